"""A retriever whose searches are waited for instead of done, as of a database elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rag_radix_frontend import Retriever, Stage


class WaitedRetriever:
    """Searches that were done before, by `prepare`.

    Args:
        retriever: Whose stages are remembered.
        search_s: How long each search takes; its stages come at even intervals.
    """

    def __init__(self, retriever: Retriever, search_s: float) -> None:
        self._retriever = retriever
        self._search_s = search_s
        self._known: dict[tuple[str, int], tuple[Stage, ...]] = {}

    def prepare(self, queries: Sequence[str], k: int) -> None:
        """Search now for what will be asked."""
        for query in set(queries):
            if (query, k) not in self._known:
                self._known[query, k] = tuple(self._retriever.retrieve(query, k))

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        stages, started_s = self._known[query, k], time.perf_counter()
        for number, stage in enumerate(stages, 1):
            due_s = started_s + self._search_s * number / len(stages)
            time.sleep(max(0.0, due_s - time.perf_counter()))
            yield stage
