"""Fails when SGLang changes what the knowledge tree is built on."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re

import pytest

from rag_radix import rpc, scheduler_hooks, sglang_compat
from rag_radix.component import KnowledgeComponent
from rag_radix.errors import IncompatibleSGLangError
from rag_radix.knowledge_tree import KnowledgeTree
from rag_radix.tree_core import DocumentNode, KnowledgeTreeCore


def test_the_installed_sglang_is_the_one_we_extend():
    assert sglang_compat.surface_problems() == []
    sglang_compat.check_sglang()


def test_a_changed_signature_and_a_missing_name_are_found(monkeypatch):
    monkeypatch.setattr(
        sglang_compat.UnifiedTreeCore, "_split_node", lambda self, node, length: None
    )
    monkeypatch.delattr(sglang_compat.UnifiedTreeCore, "_evict_host_leaf")
    problems = " ".join(sglang_compat.surface_problems())
    assert "_split_node takes ('self', 'node', 'length')" in problems
    assert "_evict_host_leaf" in problems
    with pytest.raises(IncompatibleSGLangError, match="_split_node"):
        sglang_compat.check_sglang()


def test_another_version_is_refused_by_number(monkeypatch):
    monkeypatch.setattr(sglang_compat, "version", lambda name: "0.5.24")
    with pytest.raises(IncompatibleSGLangError, match=r"0\.5\.24.*sglang==0\.5\.23"):
        sglang_compat.check_sglang()


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        (KnowledgeTree, sglang_compat.UnifiedRadixCache),
        (KnowledgeTreeCore, sglang_compat.UnifiedTreeCore),
        (KnowledgeComponent, sglang_compat.FullComponent),
    ],
)
def test_every_method_we_override_is_on_the_checked_list(ours, base):
    overridden = {
        name
        for name, value in vars(ours).items()
        if inspect.isfunction(value) and hasattr(base, name) and name != "__subclasshook__"
    }
    listed = {
        target.rpartition(".")[2]
        for target in sglang_compat._SURFACE
        if target.partition(":")[2].startswith(base.__name__ + ".")
    }
    assert overridden <= listed


def test_a_node_has_no_attribute_that_sglang_uses_for_something_else():
    base = set(vars(sglang_compat.UnifiedTreeNode((), 0)))
    ours = {
        "statistics",
        "occurrences",
        "is_tail",
        "matched",
        "host_copies",
        "ranks",
        "host_reclaims",
        "offered",
        "on_device",
        "device_children",
        "names_forgotten",
        "unmarked_documents",
    }
    assert ours.isdisjoint(base)
    assert ours | base == set(vars(DocumentNode((), 0)))


def test_a_request_that_is_barred_from_the_tree_publishes_nothing():
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache import common

    assert "self.skip_radix_cache_insert = " in inspect.getsource(Req.__init__)
    for function in (common.checkpoint_kv_cache, common.release_kv_cache):
        assert "not req.skip_radix_cache_insert" in inspect.getsource(function)


def test_the_scheduler_has_what_the_hooks_read() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    source = inspect.getsource(Scheduler)
    for name in scheduler_hooks.ATTRIBUTES:
        assert re.search(rf"\bself\.{name}\b.* = |\bself\.{name},\n", source), name
    assert sglang_compat.surface_problems(scheduler_hooks.SURFACE) == []
    hooked = {target.rpartition(".")[2] for target in scheduler_hooks.TARGETS}
    checked = {target.rpartition(".")[2] for target in scheduler_hooks.SURFACE}
    assert hooked <= checked


def test_requests_and_batches_have_what_speculations_are_ended_by() -> None:
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

    request = inspect.getsource(schedule_batch.Req)
    for name in ("to_finish", "discard_output_reason", "finished_reason", "output_ids"):
        assert f"self.{name}" in request
    assert isinstance(schedule_batch.Req.extend_len, property)
    reason = schedule_batch.FINISH_ABORT("why", 503).to_json()
    assert (reason["type"], reason["message"], reason["status_code"]) == ("abort", "why", 503)
    fields = {field.name for field in dataclasses.fields(schedule_batch.ScheduleBatch)}
    assert {"reqs", "batch_is_full", "decoding_reqs"} <= fields
    assert "self.grammar_queue: List[Req] = " in inspect.getsource(GrammarManager)
    assert {"dispatched", "finished"} <= {field.name for field in dataclasses.fields(ReqState)}
    assert callable(TokenizerManager._dispatch_to_scheduler)
    assert callable(TokenizerManager.auto_create_handle_loop)


def test_calls_and_replies_can_be_read_once_their_types_are_known() -> None:
    from sglang.srt.managers import io_struct

    rpc.register_types()
    call = rpc.RagCall(number=1, action="promote", body=b'["a"]', http_worker_ipc="ipc://1")
    assert io_struct.msgpack_decode(io_struct.msgpack_encode(call)) == call
    assert pickle.loads(pickle.dumps(call)) == call  # as ranks are sent it
    reply = rpc.RagReply(number=1, body=b"null", error="why")
    assert io_struct.msgpack_decode(io_struct.msgpack_encode(reply)) == reply


def test_a_copy_in_flight_says_what_it_locks() -> None:
    from sglang.srt.mem_cache.unified_radix_cache import _OngoingWriteThrough

    assert {"lock_params", "publish_node_ids"} <= set(_OngoingWriteThrough._fields)


def test_an_insert_walk_has_the_fields_that_ours_begins_with():
    assert sglang_compat.InsertPhase.WALK is not None
    fields = set(sglang_compat.InsertWalkState.__struct_fields__)
    assert {"phase", "node", "key", "value", "params", "priority", "result"} <= fields
    assert "total_prefix_length" in fields
