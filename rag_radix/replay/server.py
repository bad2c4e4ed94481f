"""The memory of a server that computes nothing: SGLang's pools and allocators without KV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

# Where a tree finds the shape of the model: Mistral-7B's.
_MODEL = SimpleNamespace(
    hf_text_config=SimpleNamespace(num_hidden_layers=32, hidden_size=4096, intermediate_size=14336),
    context_len=32_768,
)


@contextmanager
def replay_context(
    *,
    device_tokens: int,
    host_tokens: int,
    longest_request_tokens: int,
    page_size: int = 1,
) -> Iterator[Any]:
    """What SGLang's cache factories are called with, for a server that holds no KV.

    Allocators, host tier and transfers are SGLang's own on the CPU, over pools of two bytes a
    token. While the context is entered it stands for the process's server.

    Args:
        device_tokens: Slots of the device tier.
        host_tokens: Slots of the host tier, 0 for none; whole pages.
        longest_request_tokens: Prompt and output of the longest request.
        page_size: Slots that are taken and given back together.

    Yields:
        SGLang's `TreeCacheBuildContext`, for `rag_radix.backend.build_tree` or for SGLang's
        `create_unified_radix_cache`.
    """
    import torch
    from sglang.srt.mem_cache.allocator import (
        PagedTokenToKVPoolAllocator,
        TokenToKVPoolAllocator,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.runtime_context import get_context

    from rag_radix import cpu_platform
    from rag_radix.sglang_compat import using_all_memory

    cpu_platform.install_host_tier_shims()
    flags: dict[str, Any] = {
        "radix_cache_backend": "knowledge-tree",
        "page_size": page_size,
        "enable_hierarchical_cache": host_tokens > 0,
        # SGLang adds a page to what the ratio gives.
        "hicache_ratio": (host_tokens - page_size / 2) / device_tokens if host_tokens else None,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        "hicache_host_memory_fraction": None,
        "hicache_write_policy": "write_back",
    }
    with using_all_memory(), get_context().override_server_args(**flags) as server_args:
        kv = MHATokenToKVPool(
            device_tokens,
            page_size,
            torch.int8,
            1,
            1,
            1,
            "cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
        )
        allocator = (
            TokenToKVPoolAllocator(device_tokens, torch.int8, "cpu", kv, False)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(device_tokens, page_size, torch.int8, "cpu", kv, False)
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(1, longest_request_tokens, "cpu", False),
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
        )
        yield TreeCacheBuildContext(
            server_args=server_args,
            params=params,
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            enable_hierarchical_cache=host_tokens > 0,
            disable_radix_cache=False,
            tp_worker=SimpleNamespace(register_hicache_layer_transfer_counter=lambda counter: None),
            model_config=_MODEL,
            tp_size=1,
            tp_rank=0,
            tp_group=None,
        )
