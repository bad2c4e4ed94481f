"""What retrievals took, and what became of the requests made ahead of their results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import add
from typing import NamedTuple

from rag_radix_frontend.processes import PerProcess


class RetrievalReport(NamedTuple):
    """One retrieval, or several added up.

    A speculation that has started is in the end one of refused, ended, failed, cancelled or kept;
    until then it is none of them.

    Attributes:
        retrievals: Retrievals that came to their result.
        stages: Of their searches, final ones included.
        search_s: Time the searches took, with what was rendered and sent meanwhile.
        search_not_overlapped_s: The part of it before the speculation that was kept began; all
            of it where none was.
        started: Speculations sent to the server.
        withheld: Speculations not sent when their documents were found, since the server took
            none just then. They count as started if they were sent later.
        refused: Speculations the server refused on arrival.
        ended: Speculations the server ended in favour of other requests.
        failed: Speculations that ended with another error; the program never sees it.
        cancelled: Speculations whose documents were not the final ones, or whose program ended.
        kept: Speculations that are the answer of the program's own request.
        wasted_tokens: Tokens computed by all but the kept ones, where the server has told.
    """

    retrievals: int = 0
    stages: int = 0
    search_s: float = 0.0
    search_not_overlapped_s: float = 0.0
    started: int = 0
    withheld: int = 0
    refused: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    kept: int = 0
    wasted_tokens: int = 0

    def __add__(self, other: RetrievalReport) -> RetrievalReport:  # type: ignore[override]
        return RetrievalReport._make(map(add, self, other))


class RetrievalLog(PerProcess):
    """A report that grows, from any thread, and with it the report of all retrievals together."""

    def __init__(
        self,
        total: RetrievalLog | None = None,
        publish: Callable[[RetrievalReport], None] | None = None,
    ) -> None:
        self._report = RetrievalReport()
        self._total = total
        self._publish = publish
        super().__init__()

    def _begin(self) -> None:
        # Reentrant, as garbage collection may end a program in the middle of add().
        self._lock = threading.RLock()

    @property
    def report(self) -> RetrievalReport:
        return self._report

    def add(self, more: RetrievalReport) -> None:
        with self._lock:
            self._report += more
            if self._publish is not None:
                self._publish(self._report)
        if self._total is not None:
            self._total.add(more)
