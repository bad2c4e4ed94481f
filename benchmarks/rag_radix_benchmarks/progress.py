"""What a long measurement says while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

# What was measured before comes from a file in no time.
KNOWN_S = 0.1


def progress(message: str) -> None:
    """Say what is going on, beside the result on stdout."""
    print(message, file=sys.stderr, flush=True)


class Remaining:
    """Estimates the time to the end from the steps that took any.

    Args:
        steps: How many there are.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0
        self._timed = 0
        self._timed_s = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A step."""
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        self._done += 1
        if seconds < KNOWN_S:
            return
        self._timed += 1
        self._timed_s += seconds
        left = max(self._steps - self._done, 0)
        left_minutes = left * self._timed_s / self._timed / 60
        progress(f"{self._done} of {self._steps} runs, about {left_minutes:.0f} min left")
