"""Waiting for a state that a server reports: a slow machine only takes longer to get there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from e2e.cpu_server import Server

DEADLINE_S = 60.0


def until(condition: Callable[[], Any]) -> Any:
    """Wait until `condition` holds, and return what it returns."""
    deadline = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.005)
    return result


@contextmanager
def slow_passes(server: Server) -> Iterator[None]:
    """While within, a scheduler sleeps before each pass: a prompt in chunks or a long answer is
    still at work when a test has done what it does meanwhile."""
    server.post("/slow_down", {"forward_sleep_time": 0.1})
    try:
        yield
    finally:
        server.post("/slow_down", {"forward_sleep_time": None})
