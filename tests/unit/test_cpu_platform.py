"""When the CPU platform is active and which server arguments it fills in."""

from __future__ import annotations

import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.platforms import current_platform
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.server_args import ServerArgs

from rag_radix import cpu_platform
from rag_radix.cpu_platform import TorchCpuPlatform, activate
from rag_radix.errors import ConfigError, IncompatibleSGLangError, UnsupportedError

pytestmark = pytest.mark.skipif(
    activate() is None, reason="this machine has an accelerator, so the platform is inactive"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "max_position_embeddings": 1024,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _resolve(model: Path, **given: Any) -> Any:
    arguments = ServerArgs(model_path=str(model), skip_tokenizer_init=True, **given)
    arguments.resolve_once()
    return arguments.resolved_dict()


def test_the_platform_is_the_active_one_without_an_accelerator() -> None:
    assert isinstance(current_platform, TorchCpuPlatform)
    assert current_platform.is_out_of_tree()
    assert current_platform.device_type == "cpu"
    assert not current_platform.capabilities.supports_triton


def test_activate_names_a_platform_class() -> None:
    name = activate()
    assert name is not None
    assert issubclass(pkgutil.resolve_name(name), SRTPlatform)


@pytest.mark.parametrize("accelerator", ["cuda", "xpu", "mps"])
def test_any_accelerator_leaves_the_machine_to_sglang(
    accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(torch, accelerator), "is_available", lambda: True)
    assert activate() is None


def test_defaults_make_a_plain_start_work(model: Path) -> None:
    resolved = _resolve(model)
    assert resolved["device"] == "cpu"
    assert resolved["attention_backend"] == "rag_prefix"
    assert resolved["sampling_backend"] == "pytorch"
    assert resolved["sleep_on_idle"]
    assert not resolved["disable_overlap_schedule"]


def test_the_device_tier_takes_no_more_than_a_quarter_of_free_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_per_token = 2 * 2 * 16 * 2 * 2  # K and V, KV heads, head dim, layers, bfloat16
    for free_bytes, expected_bytes in ((8 << 20, 2 << 20), (1 << 40, 8 << 30)):
        monkeypatch.setattr(
            "sglang.srt.utils.common.get_free_cpu_memory", lambda free=free_bytes: free
        )
        assert _resolve(model)["max_total_tokens"] == expected_bytes // bytes_per_token


def test_hierarchical_cache_gets_the_transfer_that_works_here(model: Path) -> None:
    resolved = _resolve(model, enable_hierarchical_cache=True)
    assert resolved["hicache_io_backend"] == "direct"
    assert resolved["hicache_mem_layout"] == "layer_first"


@pytest.mark.parametrize(
    "given",
    [
        {"attention_backend": "torch_native"},
        {"max_total_tokens": 777},
        {"mem_fraction_static": 0.4, "max_total_tokens": None},
        {"page_size": 16},
        {"disable_overlap_schedule": True},
        {"device": "cpu"},
    ],
)
def test_what_the_user_sets_wins(model: Path, given: dict[str, Any]) -> None:
    resolved = _resolve(model, **given)
    assert {name: resolved[name] for name in given} == given


def test_a_transfer_that_needs_a_gpu_is_refused_by_name(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--hicache-mem-layout page_head .*'layer_first'"):
        _resolve(model, enable_hierarchical_cache=True, hicache_mem_layout="page_head")
    with pytest.raises(UnsupportedError, match=r"--hicache-storage-backend hf3fs .*'file'"):
        _resolve(model, enable_hierarchical_cache=True, hicache_storage_backend="hf3fs")
    given = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
    assert _resolve(model, **given)["hicache_mem_layout"] == "layer_first"


def test_shims_refuse_a_host_pool_they_were_not_written_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    monkeypatch.setattr(MLATokenToKVPoolHost, "load_to_device_per_layer", lambda self: None)
    with pytest.raises(IncompatibleSGLangError, match="transfer_kv_direct"):
        cpu_platform.install_host_tier_shims()
