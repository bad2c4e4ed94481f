"""Threads that are used again, since starting one costs more than what it does for a guess."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

_IDLE_S = 1.0

Work = Callable[[], None]


class Workers:
    """Runs any number of things at once, on daemon threads that stay for a second afterwards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        # Threads that wait for work, less the work that waits for them.
        self._idle = 0

    def start(self, work: Work) -> None:
        """Have `work` done by another thread, at once; it raises nothing."""
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._work.put(work)
                return
        threading.Thread(target=self._run, args=(work,), name="rag-worker", daemon=True).start()

    def _run(self, work: Work | None) -> None:
        while work is not None:
            work()
            # What it holds may be the last reference to a program.
            del work
            with self._lock:
                self._idle += 1
            work = self._next()

    def _next(self) -> Work | None:
        while True:
            try:
                return self._work.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._work.empty():
                        self._idle -= 1
                        return None


WORKERS = Workers()
# A process that was forked has none of its parent's threads.
os.register_at_fork(after_in_child=WORKERS.__init__)  # type: ignore[misc]
