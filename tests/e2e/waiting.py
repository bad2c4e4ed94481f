"""Waiting for a state that a server reports: a slow machine only takes longer to get there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0


def until(condition: Callable[[], Any]) -> Any:
    """Wait until `condition` holds, and return what it returns."""
    deadline = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.005)
    return result
