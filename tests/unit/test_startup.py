"""What the factory refuses, and that a failed registration can't go unnoticed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from tree_harness import harness

from rag_radix import backend, door, scheduler_hooks
from rag_radix.errors import ConfigError, IncompatibleSGLangError, UnsupportedError


@pytest.fixture(autouse=True)
def hooks_in_place(monkeypatch):
    # No scheduler runs in this process; the server tests have the real ones.
    monkeypatch.setattr(door, "verify", lambda: None)
    monkeypatch.setattr(scheduler_hooks, "verify", lambda: None)


def context(*, hybrid_swa=False, hybrid_ssm=False, eagle=False, disabled=False, host=False, **args):
    from sglang.srt.server_args import ServerArgs

    return SimpleNamespace(
        server_args=ServerArgs(model_path="dummy", **args),
        params=SimpleNamespace(is_eagle=eagle),
        is_hybrid_swa=hybrid_swa,
        is_hybrid_ssm=hybrid_ssm,
        disable_radix_cache=disabled,
        enable_hierarchical_cache=host,
        model_config=None,
    )


@pytest.mark.parametrize(
    ("situation", "named"),
    [
        ({"hybrid_swa": True}, "sliding-window"),
        ({"hybrid_ssm": True}, "Mamba"),
        ({"eagle": True}, "EAGLE"),
        ({"disabled": True}, "--disable-radix-cache"),
        ({"enable_session_radix_cache": True}, "--enable-session-radix-cache"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_flexkv": True}, "--enable-flexkv"),
        ({"enable_unified_cache_external_linker": True}, "external-linker"),
        ({"hicache_host_memory_mode": "buffer_only"}, "buffer_only"),
        ({"pp_size": 2}, "--pp-size"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"hicache_storage_backend": "file", "enable_lora": True}, "LoRA"),
        ({"hicache_storage_backend": "file", "lora_paths": ["style=/adapters/style"]}, "LoRA"),
        ({"hicache_ratio": 2.0}, "add --enable-hierarchical-cache"),
        ({"hicache_size": 8}, "add --enable-hierarchical-cache"),
    ],
)
def test_what_does_not_work_together_is_refused_by_name(situation, named):
    with pytest.raises(UnsupportedError, match=named):
        backend.create_knowledge_tree(context(**situation))


def test_a_missing_hook_stops_the_server(monkeypatch):
    def missing():
        raise IncompatibleSGLangError("the hook isn't in place")

    monkeypatch.setattr(door, "verify", missing)
    with pytest.raises(IncompatibleSGLangError, match="isn't in place"):
        backend.create_knowledge_tree(context())


def test_a_tree_of_foreign_parts_is_refused(monkeypatch):
    foreign = SimpleNamespace(tree_core=object(), components={})
    with pytest.raises(IncompatibleSGLangError, match="other parts than ours"):
        backend._verify_in_use(foreign)


def test_a_failed_registration_is_raised_by_whoever_selects_the_tree(fresh):
    lines = fresh.run(
        "from rag_radix import door, plugin\n"
        "def broken(): raise RuntimeError('no such hook')\n"
        "door.install = broken\n"
        "try: plugin.register()\n"
        "except RuntimeError as error: print('logged:', error)\n"
        "from sglang.srt.mem_cache.registry import get_radix_cache_factory\n"
        "try: get_radix_cache_factory('knowledge-tree')(None)\n"
        "except RuntimeError as error: print('raised:', error)\n"
    ).splitlines()
    assert lines[-2:] == ["logged: no such hook", "raised: no such hook"]


def test_loaded_but_not_selected_sglang_keeps_its_own_cache_choices_and_methods(fresh):
    lines = fresh.run(
        "from sglang.srt.managers import scheduler, tokenizer_manager as manager\n"
        "from sglang.srt.entrypoints import http_server\n"
        "from sglang.srt.entrypoints.openai import serving_chat\n"
        "from sglang.srt.mem_cache import registry\n"
        "from sglang.srt.mem_cache.unified_cache import tree_core_registry as cores\n"
        "from sglang.srt.mem_cache.unified_radix_cache import COMPONENT_REGISTRY\n"
        "before = (list(cores.registered_tree_core_backends()), dict(COMPONENT_REGISTRY),\n"
        "          http_server.serve_generate_request, len(http_server.app.routes),\n"
        "          serving_chat.OpenAIServingChat._convert_to_internal_request)\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "after = (list(cores.registered_tree_core_backends()), dict(COMPONENT_REGISTRY),\n"
        "         http_server.serve_generate_request, len(http_server.app.routes),\n"
        "         serving_chat.OpenAIServingChat._convert_to_internal_request)\n"
        "print(before == after, registry.registered_radix_cache_backends())\n"
    ).splitlines()
    assert lines[-1] == "True ['knowledge-tree']"


def test_ranks_that_have_read_different_cost_tables_do_not_start(monkeypatch, tmp_path):
    path = tmp_path / "profile.json"
    table = {"cached_tokens": [0, 9], "new_tokens": [1, 9], "seconds": [[1, 2], [3, 4]]}
    path.write_text(json.dumps(table))
    compared = []

    def all_reduce(tree, tensor, op):
        compared.append(tensor.tolist())
        assert op == torch.distributed.ReduceOp.MIN
        # What the two ranks come to of which the other has another digest.
        tensor.copy_(torch.minimum(tensor, torch.tensor([5, -5])))

    with harness(device_tokens=100, policy_config={"cost_table": str(path)}) as h:
        backend._agree_on_cost(h.tree)
        monkeypatch.setattr(type(h.tree), "_all_reduce_attn_groups", all_reduce)
        with pytest.raises(ConfigError, match=f"{path} isn't the same on all ranks: give each"):
            backend._agree_on_cost(h.tree)
    with harness(device_tokens=100) as h, pytest.raises(ConfigError, match="the model's shape"):
        backend._agree_on_cost(h.tree)
    assert compared[0] != compared[1]
