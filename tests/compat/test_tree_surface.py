"""Fails when SGLang changes what the knowledge tree is built on."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
import re
from hashlib import sha256
from types import SimpleNamespace

import pytest

from rag_radix import rpc, scheduler_hooks, sglang_compat
from rag_radix.component import KnowledgeComponent
from rag_radix.errors import IncompatibleSGLangError
from rag_radix.knowledge_tree import KnowledgeTree
from rag_radix.node import DocumentNode
from rag_radix.profile.server import Conditions
from rag_radix.tree_core import KnowledgeTreeCore


def test_the_installed_sglang_is_the_one_we_extend():
    assert sglang_compat.surface_problems() == []
    sglang_compat.check_sglang()


def test_a_changed_signature_and_a_missing_name_are_found(monkeypatch):
    monkeypatch.setattr(
        sglang_compat.UnifiedTreeCore, "_split_node", lambda self, node, length: None
    )
    monkeypatch.delattr(sglang_compat.UnifiedTreeCore, "_unevict_node_on_insert")
    problems = " ".join(sglang_compat.surface_problems())
    assert "_split_node takes ('self', 'node', 'length')" in problems
    assert "_unevict_node_on_insert" in problems
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
    own = [vars(c) for c in ours.__mro__ if c.__module__.startswith("rag_radix.")]
    overridden = {
        name
        for attributes in own
        for name, value in attributes.items()
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
        "keeps_host_copy",
        "ranks",
        "host_reclaims",
        "mark",
        "offered",
        "on_device",
        "on_host",
        "device_children",
        "names_forgotten",
        "unmarked_documents",
        "unmarked_forgotten",
    }
    assert ours.isdisjoint(base)
    attributes = {*vars(DocumentNode), *vars(DocumentNode((), 0))}
    assert ours | base == {name for name in attributes if not name.startswith("__")}


def test_a_node_keeps_its_attributes_in_a_table_that_all_nodes_share():
    # Those of CPython have 30 at most.
    assert len(vars(DocumentNode((), 0))) <= 25


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


def test_a_dtype_has_one_name_whatever_it_was_asked_for_by() -> None:
    model = SimpleNamespace(hf_text_config=SimpleNamespace(dtype="bfloat16"))
    asked = ("auto", "bfloat16", "half", "float32")
    named = [sglang_compat.dtype_name(model, name) for name in asked]
    assert named == ["bfloat16", "bfloat16", "float16", "float32"]


def test_a_profiled_server_states_what_a_profile_holds_for() -> None:
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", page_size=16, prefill_attention_backend="flashinfer")
    conditions = Conditions.of(args.resolved_dict(), sglang_compat.accelerator_name(), "0.5.23")
    assert (conditions.page_size, conditions.attention_backend) == (16, "flashinfer")


def test_a_copy_in_flight_says_what_it_locks() -> None:
    from sglang.srt.mem_cache.unified_radix_cache import _OngoingWriteThrough

    assert {"lock_params", "publish_node_ids"} <= set(_OngoingWriteThrough._fields)


# What ours is written in place of; where it changes, ours may have to as well.
REPLACED = {
    "mem_cache.unified_radix_cache:UnifiedRadixCache": (
        "checkpoint_into_tree",
        "evict_for_alloc",
        "_evict_components",
        "_execute_and_commit_kv_backup",
        "_execute_kv_backup",
        "_track_write_through_node",
        "check_hicache_events",
        "lock",
    ),
    "mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore": (
        "match_prefix",
        "_match_prefix_helper",
        "_match_post_processor",
        "begin_insert",
        "_insert_walk_step",
        "_insert_overlap_step",
        "_insert_commit_step",
        "_add_new_node",
        "inc_lock_ref",
        "dec_lock_ref",
        "finish_write_through",
        "mark_write_through_pending",
        "commit_backup",
        "drop_subtree_no_host",
        "_delete_unbacked_device_leaf",
        "_release_all_component_layers",
        "_evict_host_leaf",
        "_demote",
        "_cascade_evict",
        "_remove_leaf_from_parent",
        "_evict_component_and_detach_lru",
        "_update_evictable_leaf_sets",
        "_is_device_leaf",
        "_is_host_leaf",
        "drive_host_eviction",
    ),
    "mem_cache.unified_cache.unified_tree_core:UnifiedTreeNode": ("__init__",),
    "mem_cache.unified_cache.components.full:FullComponent": (
        "acquire_component_lock",
        "release_component_lock",
        "evict_component",
        "drive_host_eviction",
        "commit_hicache_transfer",
        "finalize_match_result_in_tree_core",
    ),
    "mem_cache.unified_cache.components.base:ComponentData": (),
    "mem_cache.unified_cache.components.base:TreeComponent": (
        "prepare_for_caching_req",
        "cleanup_after_caching_req",
        "commit_insert_component_data",
        "update_component_on_insert_overlap",
        "recover_after_unevict",
    ),
}
REPLACED_DIGEST = "9a1cb9fa89e3416c"


def test_what_ours_is_written_in_place_of_has_not_changed():
    sources = []
    for place, methods in REPLACED.items():
        module, _, name = place.partition(":")
        owner = getattr(importlib.import_module(f"sglang.srt.{module}"), name)
        parts = [getattr(owner, method) for method in methods] or [owner]
        sources += [inspect.getsource(inspect.unwrap(part)) for part in parts]
    assert sha256("".join(sources).encode()).hexdigest()[:16] == REPLACED_DIGEST


def test_a_node_has_what_sglangs_own_begins_with():
    types = (sglang_compat.ComponentType.FULL,)
    ours, theirs = DocumentNode(types, 7), sglang_compat.UnifiedTreeNode(types, 7)
    counted = {"id", "creation_time", "last_access_time"}
    for name in vars(theirs).keys() - counted:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.creation_time < theirs.creation_time


def test_ids_ascend_and_a_new_node_changes_no_class():
    types = (sglang_compat.ComponentType.FULL,)
    before = sglang_compat.UnifiedTreeNode.counter
    first, second = DocumentNode(types, 0), DocumentNode(types, 0)
    assert first.id < second.id
    assert sglang_compat.UnifiedTreeNode.counter == before
