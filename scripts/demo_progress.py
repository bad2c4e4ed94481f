"""Tells that a long step goes on: a running clock on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_S = 2.0
TICK_S = 0.25


@contextmanager
def progress(label: str) -> Iterator[None]:
    """Show `label` and the time passed while the body runs, when that is two seconds or more."""
    started_s = time.monotonic()
    finished = threading.Event()
    ticker = threading.Thread(target=_tick, args=(label, started_s, finished), daemon=True)
    ticker.start()
    try:
        yield
    finally:
        finished.set()
        ticker.join()
        elapsed_s = time.monotonic() - started_s
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        if elapsed_s >= QUIET_S:
            print(f"{label}: {elapsed_s:.0f} s", file=sys.stderr, flush=True)


def _tick(label: str, started_s: float, finished: threading.Event) -> None:
    if not sys.stderr.isatty():
        if not finished.wait(QUIET_S):
            print(f"{label} ...", file=sys.stderr, flush=True)
        return
    while not finished.wait(TICK_S):
        elapsed_s = time.monotonic() - started_s
        print(f"\r{label} ... {elapsed_s:.0f} s", end="", file=sys.stderr, flush=True)
