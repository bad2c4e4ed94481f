"""Entry point of SGLang's plugin group: registers what rag-radix adds, in every process."""

from __future__ import annotations

from typing import Any

from rag_radix.environment import COMPARISON
from rag_radix.names import BACKEND

_registered = False


def register() -> None:
    """Register the backend, its policies, the attention backend and the hooks; idempotent.

    Nothing SGLang does changes until a flag selects one of them. SGLang logs an exception from
    here and goes on, so a failure is kept for whoever selects the knowledge tree: its factory
    raises it, and the server does not start.
    """
    global _registered
    if _registered:
        return
    _registered = True

    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    try:
        _register_parts()
    except Exception as error:
        failure = error

        def refuse(ctx: Any) -> Any:
            raise failure

        register_radix_cache_backend(BACKEND, refuse)
        raise
    register_radix_cache_backend(BACKEND, _create)


def _register_parts() -> None:
    from rag_radix_kernels import sglang_backend
    from sglang.srt.arg_groups.choices import (
        RADIX_EVICTION_POLICY_CHOICES,
        add_radix_eviction_policy_choices,
    )

    from rag_radix import door, rpc, scheduler_hooks
    from rag_radix.policies import POLICIES

    sglang_backend.register()
    add_radix_eviction_policy_choices(
        [name for name in POLICIES if name not in RADIX_EVICTION_POLICY_CHOICES]
    )
    door.install()
    rpc.register_types()
    scheduler_hooks.install()
    if COMPARISON.is_set():
        from rag_radix import comparison

        comparison.install()


def _create(ctx: Any) -> Any:
    from rag_radix.backend import create_knowledge_tree

    return create_knowledge_tree(ctx)
