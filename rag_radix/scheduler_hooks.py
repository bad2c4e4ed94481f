"""What we add to SGLang's scheduler: the tree's report, and the tree's view of the queue."""

from __future__ import annotations

import sys
from typing import Any

from rag_radix.door import is_applied
from rag_radix.errors import IncompatibleSGLangError
from rag_radix.names import STATE_KEY

_MODULE = "sglang.srt.managers.scheduler"


def install() -> None:
    """Register the hooks where there is a scheduler; they do nothing for another cache."""
    if _MODULE in sys.modules:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for target, hook in TARGETS.items():
            HookRegistry.register(target, hook, HookType.AFTER)


def verify() -> None:
    """Raise IncompatibleSGLangError unless this process's scheduler has the hooks."""
    for target, hook in TARGETS.items():
        if not is_applied(target, hook):
            raise IncompatibleSGLangError(
                f"the hook on {target} isn't in place: the log says why, and without it "
                "/rag/stats would be empty and the waiting queue unknown to the policy"
            )


def _add_report(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    report = getattr(scheduler.tree_cache, "report", None)
    if report is not None:
        result.internal_state[STATE_KEY] = report()


def _show_queue(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    if hasattr(scheduler.tree_cache, "waiting"):
        # SGLang makes a new list whenever requests leave the queue.
        scheduler.tree_cache.waiting = lambda: scheduler.waiting_queue


TARGETS = {
    f"{_MODULE}.Scheduler.get_internal_state": _add_report,
    f"{_MODULE}.Scheduler.__init__": _show_queue,
}
