"""What we add to SGLang's scheduler: the tree's report in its internal state."""

from __future__ import annotations

import sys
from typing import Any

from rag_radix.door import is_applied
from rag_radix.errors import IncompatibleSGLangError
from rag_radix.names import STATE_KEY

_MODULE = "sglang.srt.managers.scheduler"
TARGET = f"{_MODULE}.Scheduler.get_internal_state"


def install() -> None:
    """Register the hook where there is a scheduler; it does nothing for another cache."""
    if _MODULE in sys.modules:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(TARGET, _add_report, HookType.AFTER)


def verify() -> None:
    """Raise IncompatibleSGLangError unless this process's scheduler has the hook."""
    if not is_applied(TARGET, _add_report):
        raise IncompatibleSGLangError(
            f"the hook on {TARGET} isn't in place, so /rag/stats would be empty; the log says why"
        )


def _add_report(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    report = getattr(scheduler.tree_cache, "report", None)
    if report is not None:
        result.internal_state[STATE_KEY] = report()
