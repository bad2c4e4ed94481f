"""KV bytes through SGLang's own device and host pools, with the CPU shims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from rag_radix.cpu_platform import install_host_tier_shims

LAYERS = 3
TOKENS = 96


@pytest.fixture(autouse=True, scope="module")
def _shims() -> None:
    install_host_tier_shims()


def _mha(page_size: int, dtype: torch.dtype) -> tuple[KVCache, Any]:
    device = MHATokenToKVPool(
        TOKENS, page_size, dtype, 3, 16, LAYERS, "cpu", enable_memory_saver=False
    )
    host = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        page_size,
        "layer_first",
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS - 1,
    )
    return device, host


def _mla(page_size: int, dtype: torch.dtype) -> tuple[KVCache, Any]:
    device = MLATokenToKVPool(
        TOKENS, page_size, dtype, 32, 8, LAYERS, "cpu", enable_memory_saver=False
    )
    host = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        page_size,
        "layer_first",
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS - 1,
        target_layer_num=LAYERS,
    )
    return device, host


def _layers(pool: KVCache) -> list[torch.Tensor]:
    if isinstance(pool, MLATokenToKVPool):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


def _pages(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.tensor([page * page_size + i for page in pages for i in range(page_size)])


@pytest.mark.parametrize("make", [_mha, _mla])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kv_survives_a_round_trip_through_the_host_bit_for_bit(
    make: Any, page_size: int, dtype: torch.dtype
) -> None:
    device, host = make(page_size, dtype)
    torch.manual_seed(0)
    for layer in _layers(device):
        # Every bit pattern, NaNs and denormals among them: a copy mustn't interpret.
        bits = torch.randint(0, 256, (layer.numel() * layer.itemsize,), dtype=torch.uint8)
        layer.view(-1).view(torch.uint8).copy_(bits)
    before = [layer.clone() for layer in _layers(device)]
    source, target = _pages([4, 1, 3], page_size), _pages([2, 5, 1], page_size)
    on_host = host.alloc(len(source))

    host.backup_from_device_all_layer(device, on_host, source, "direct")
    for layer in _layers(device):
        layer.zero_()
    for layer_id in range(LAYERS):
        host.load_to_device_per_layer(device, on_host, target, layer_id, "direct")

    for layer, original in zip(_layers(device), before, strict=True):
        assert torch.equal(layer[target].view(torch.uint8), original[source].view(torch.uint8))
        untouched = torch.ones(len(layer), dtype=torch.bool)
        untouched[target] = False
        assert not layer[untouched].view(torch.uint8).any()
