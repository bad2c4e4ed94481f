"""What a server that takes part in a comparison says of itself, and one cache made for it.

Only where the environment asks for it (`RAG_RADIX_COMPARISON`). SGLang doesn't state which cache
it built, so its internal state is given what the scheduler really holds; and its older
`RadixCache`, which it builds for special models alone, can be selected by name.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from rag_radix.settings import TreeSettings

STATE_KEY = "rag_radix_comparison"
"""Key of `observed` in the scheduler's internal state."""

RADIX_CACHE_BACKEND = "sglang-radix-cache"
"""Value of `--radix-cache-backend` that selects SGLang's `RadixCache`."""

_SCHEDULER = "sglang.srt.managers.scheduler"


def install() -> None:
    """Register both in this process."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend(RADIX_CACHE_BACKEND, _radix_cache)
    if _SCHEDULER in sys.modules:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        target = f"{_SCHEDULER}.Scheduler.get_internal_state"
        HookRegistry.register(target, _add_observed, HookType.AFTER)


def _radix_cache(ctx: Any) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixCache

    return RadixCache(ctx.params)


def _add_observed(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    result.internal_state[STATE_KEY] = observed(scheduler)


def stated_settings(settings: TreeSettings) -> dict[str, Any]:
    """Settings of a knowledge tree that decide what it does, as plain JSON values."""
    return {
        "policy": asdict(settings.policy),  # type: ignore[call-overload]
        **{
            name: getattr(settings, name)
            for name in ("swap_out", "max_depth", "reorder_window", "max_prefill_bs")
        },
    }


def observed(scheduler: Any) -> dict[str, Any]:
    """What a scheduler was built from, as plain JSON values.

    Classes are named by their own names. Sizes are those of the pools, not of the flags. A tree
    core in Rust doesn't tell its policy; then it is the flag's, from which it was built.
    """
    from sglang.srt.runtime_context import get_memory

    cache = scheduler.tree_cache
    controller, core = cache.cache_controller, getattr(cache, "tree_core", None)
    settings = getattr(cache, "settings", None)
    return {
        "cache": type(cache).__name__,
        "tree_core": None if core is None else type(core).__name__,
        "caching": not cache.disable,
        "eviction_policy": (
            get_memory().radix_eviction_policy if settings is None else settings.policy.name
        ),
        "write_policy": None if controller is None else controller.write_policy,
        "order": scheduler.policy.policy.value,
        "settings": None if settings is None else stated_settings(settings),
        "attention": type(scheduler.tp_worker.model_runner.attn_backend).__name__,
        "device_tokens": scheduler.token_to_kv_pool_allocator.size,
        "host_tokens": 0 if controller is None else controller.mem_pool_host.logical_size,
        "page_size": scheduler.page_size,
        "chunk_tokens": scheduler.chunked_prefill_size,
        "running_requests": scheduler.max_running_requests,
    }
