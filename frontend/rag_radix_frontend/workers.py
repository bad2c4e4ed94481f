"""Threads that are used again, since starting one costs more than what it does for a guess."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from rag_radix_frontend.processes import PerProcess

_IDLE_S = 1.0

Work = Callable[[], None]


class Workers(PerProcess):
    """Runs any number of things at once, on daemon threads that stay for a second afterwards.

    There is no lock, since garbage collection may end a program, and so start work, anywhere.
    """

    def _begin(self) -> None:
        # Where threads that are idle wait for work; the last one is the youngest.
        self._idle: deque[queue.SimpleQueue[Work]] = deque()

    def start(self, work: Work) -> None:
        """Have `work` done by another thread, at once; it raises nothing."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            threading.Thread(target=self._run, args=(work,), name="rag-worker", daemon=True).start()
        else:
            inbox.put(work)

    def _run(self, work: Work | None) -> None:
        inbox: queue.SimpleQueue[Work] = queue.SimpleQueue()
        while work is not None:
            work()
            # What it holds may be the last reference to a program.
            del work
            self._idle.append(inbox)
            work = self._next(inbox)

    def _next(self, inbox: queue.SimpleQueue[Work]) -> Work | None:
        try:
            return inbox.get(timeout=_IDLE_S)
        except queue.Empty:
            try:
                self._idle.remove(inbox)
            except ValueError:  # It was taken just now, and work is on its way.
                return inbox.get()
            return None


WORKERS = Workers()
