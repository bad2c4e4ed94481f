"""What a server that takes part in a comparison says of itself, and one cache made for it.

Only where the environment asks for it (`RAG_RADIX_COMPARISON`). SGLang doesn't state which cache
it built, nor what it copies between its tiers, so its internal state is given what the scheduler
really holds, the CPU time that choosing batches and keeping what they computed has taken, and the
bytes moved each way; and its older `RadixCache`, which it builds for special models alone, can be
selected by name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rag_radix.settings import TreeSettings

STATE_KEY = "rag_radix_comparison"
"""Key in the scheduler's internal state: `observed` as `built`, `scheduling_parts_s` and
`moved_bytes`."""

RADIX_CACHE_BACKEND = "sglang-radix-cache"
"""Value of `--radix-cache-backend` that selects SGLang's `RadixCache`."""

_SCHEDULER = "sglang.srt.managers.scheduler"
_CACHING = "sglang.srt.mem_cache.common"
_TRANSFERS = "sglang.srt.managers.cache_controller.HiCacheController"


def install() -> None:
    """Register both in this process."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend(RADIX_CACHE_BACKEND, _radix_cache)
    if _SCHEDULER in sys.modules:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        scheduler = f"{_SCHEDULER}.Scheduler"
        HookRegistry.register(f"{scheduler}.get_internal_state", _add_state, HookType.AFTER)
        HookRegistry.register(f"{scheduler}.get_next_batch_to_run", _choosing, HookType.AROUND)
        # By which every cache is told of a prefill's end and of a request's.
        for told in ("checkpoint_kv_cache", "release_kv_cache"):
            HookRegistry.register(f"{_CACHING}.{told}", _keeping, HookType.AROUND)
        HookRegistry.register(f"{_TRANSFERS}.start_writing", _writing, HookType.AROUND)
        HookRegistry.register(f"{_TRANSFERS}.start_loading", _loading, HookType.AROUND)


def _radix_cache(ctx: Any) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixCache

    return RadixCache(ctx.params)


def _add_state(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    result.internal_state[STATE_KEY] = {
        "built": observed(scheduler),
        "scheduling_parts_s": _scheduling.parts_s,
        "moved_bytes": (
            {"out": _moved.out, "in": _moved.back} if scheduler.enable_hierarchical_cache else None
        ),
    }


class CpuTime:
    """CPU time of the scheduler's thread, since the process began.

    Attributes:
        parts_s: By part, `choosing` batches and `keeping` what they computed; what is kept while
            a batch is chosen is in `choosing`.
        copying_s: Of copies between the tiers, which a GPU makes by itself; in no part.
    """

    def __init__(self) -> None:
        self.parts_s = {"choosing": 0.0, "keeping": 0.0}
        self.copying_s = 0.0
        self._is_timed = False

    def timed(self, part: str, function: Callable[[], Any]) -> Any:
        """Call a function and count its time into a part, unless its caller's is counted."""
        if self._is_timed:
            return function()
        started_s, copied_s = time.thread_time(), self.copying_s
        self._is_timed = True
        try:
            return function()
        finally:
            self._is_timed = False
            copying_s = self.copying_s - copied_s
            self.parts_s[part] += time.thread_time() - started_s - copying_s


_scheduling = CpuTime()


def _choosing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _scheduling.timed("choosing", partial(original, *args, **kwargs))


def _keeping(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _scheduling.timed("keeping", partial(original, *args, **kwargs))


def _copied(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    started_s = time.thread_time()
    try:
        return original(*args, **kwargs)
    finally:
        _scheduling.copying_s += time.thread_time() - started_s


@dataclass
class _MovedBytes:
    """Bytes that the cache's controller was told to copy to host and back to the device."""

    out: int = 0
    back: int = 0


_moved = _MovedBytes()


def _writing(original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any) -> Any:
    _moved.out += _queued_bytes(controller, controller.write_queue)
    return _copied(original, controller, *args, **kwargs)


def _loading(original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any) -> Any:
    _moved.back += _queued_bytes(controller, controller.load_queue)
    return _copied(original, controller, *args, **kwargs)


def _queued_bytes(controller: Any, operations: Sequence[Any]) -> int:
    tokens = sum(len(operation.device_indices) for operation in operations)
    return tokens * int(controller.mem_pool_host.size_per_token)


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

    cache, runner = scheduler.tree_cache, scheduler.tp_worker.model_runner
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
        "attention": type(runner.attn_backend).__name__,
        "dtype": str(runner.dtype),
        "kv_dtype": str(runner.kv_cache_dtype),
        "tp_size": scheduler.tp_size,
        "device_tokens": scheduler.token_to_kv_pool_allocator.size,
        "host_tokens": 0 if controller is None else controller.mem_pool_host.logical_size,
        "page_size": scheduler.page_size,
        "chunk_tokens": scheduler.chunked_prefill_size,
        "running_requests": scheduler.max_running_requests,
    }
