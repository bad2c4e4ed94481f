"""The SGLang internals that the CPU platform, its shims and `rag_prefix` rely on."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups import choices, platform_hook
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import common, mha, mla
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang.srt.server_args import ServerArgs


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_platform_hooks_are_still_called_by_these_names() -> None:
    assert _parameters(SRTPlatform.apply_server_args_defaults) == ["self", "server_args"]
    assert _parameters(SRTPlatform.init_backend) == ["self"]
    assert _parameters(SRTPlatform.get_default_attention_backend) == ["self"]
    assert "apply_server_args_defaults" in inspect.getsource(platform_hook)
    assert not PlatformCapabilities().supports_triton


def test_the_cpu_mixin_still_answers_with_a_device_where_server_args_hold_a_name() -> None:
    # Expires `TorchCpuPlatform.get_device`: once this fails, the override can go.
    assert isinstance(CpuDeviceMixin().get_device(), torch.device)


def test_hicache_defaults_are_those_that_count_as_left_open() -> None:
    defaults = ServerArgs(model_path="unresolved")
    assert defaults.hicache_io_backend == "kernel"
    assert defaults.hicache_mem_layout == "page_first"
    for name in ("attention_backend", "max_total_tokens", "mem_fraction_static"):
        assert getattr(defaults, name) is None
    assert defaults.sleep_on_idle is False


def test_host_allocators_are_keyed_by_device_type_and_called_like_ours() -> None:
    assert "npu" in common.ALLOC_MEMORY_FUNCS
    assert _parameters(common.alloc_with_pin_memory) == [
        "dims",
        "dtype",
        "device",
        "pin_memory",
        "allocator",
        "registration_granularity_bytes",
    ]
    for module in (mha, mla):
        assert module.ALLOC_MEMORY_FUNCS is common.ALLOC_MEMORY_FUNCS


@pytest.mark.parametrize("pool", [mha.MHATokenToKVPoolHost, mla.MLATokenToKVPoolHost])
def test_host_pools_copy_with_transfer_kv_direct(pool: type) -> None:
    for name in ("load_to_device_per_layer", "backup_from_device_all_layer"):
        method = getattr(pool, name)
        assert "transfer_kv_direct" in method.__code__.co_names
        for argument in ("src_layers=", "dst_layers=", "src_indices=", "dst_indices="):
            assert argument in inspect.getsource(method)


def test_the_attention_registry_takes_a_factory_by_name() -> None:
    assert callable(attention_registry.ATTENTION_BACKENDS["torch_native"])
    assert choices.add_attention_backend_choices == choices.ATTENTION_BACKEND_CHOICES.extend


def test_torch_native_has_the_methods_that_rag_prefix_overrides() -> None:
    for name in ("forward_extend", "forward_decode"):
        assert _parameters(getattr(TorchNativeAttnBackend, name)) == [
            "self",
            "q",
            "k",
            "v",
            "layer",
            "forward_batch",
            "save_kv_cache",
        ]
    source = inspect.getsource(TorchNativeAttnBackend.__init__)
    for attribute in ("req_to_token_pool", "token_to_kv_pool"):
        assert f"self.{attribute} =" in source


def test_torch_native_still_ignores_logit_capping() -> None:
    # Expires the refusal of models with logit capping: once torch_native caps, we can delegate.
    assert "logit_cap" not in inspect.getsource(TorchNativeAttnBackend)


def test_layers_batches_and_pools_have_the_fields_that_rag_prefix_reads() -> None:
    layer = inspect.getsource(RadixAttention.__init__)
    for name in (
        "tp_q_head_num",
        "qk_head_dim",
        "v_head_dim",
        "scaling",
        "layer_id",
        "sliding_window_size",
        "is_cross_attention",
        "attn_type",
        "logit_cap",
    ):
        assert f"self.{name} =" in layer
    batch = {field.name for field in fields(ForwardBatch)}
    assert batch >= {
        "forward_mode",
        "req_pool_indices",
        "seq_lens",
        "extend_prefix_lens",
        "extend_seq_lens",
        "out_cache_loc",
        "encoder_lens",
    }
    assert ForwardMode.IDLE.is_decode_or_idle()
    assert ForwardMode.MIXED.is_extend()
    assert AttentionType.DECODER.value == "decoder"
    assert KVWriteLoc(torch.zeros(1), None) is not None
    for pool in (MHATokenToKVPool, MLATokenToKVPool):
        for name in ("get_key_buffer", "get_value_buffer", "set_kv_buffer"):
            assert callable(getattr(pool, name))


def test_torch_has_the_flash_kernel_that_returns_a_log_sum_exp() -> None:
    schema = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema
    assert [argument.name for argument in schema.arguments] == [
        "query",
        "key",
        "value",
        "dropout_p",
        "is_causal",
        "attn_mask",
        "scale",
    ]
    assert [result.name for result in schema.returns] == ["output", "logsumexp"]
