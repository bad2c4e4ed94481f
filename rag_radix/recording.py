"""Writes what a server is asked as a trace that can be replayed; never any text."""

from __future__ import annotations

import time

from rag_radix.replay.trace import TraceDocument, TraceRequest, TraceWriter
from rag_radix.retrieval import Retrieval
from rag_radix.statistics import namespace_name


class TraceRecorder:
    """Appends each request to a trace when it ends, in the order of their ends; a speculation
    when it has ended and is promoted.

    Raises:
        TraceError: The file can't be opened for appending.
    """

    def __init__(self, path: str) -> None:
        self._writer = TraceWriter(path)
        self._started_s = time.monotonic()

    def now_s(self) -> float:
        """Seconds since the trace began."""
        return time.monotonic() - self._started_s

    def record(self, retrieval: Retrieval, output_tokens: int) -> None:
        documents = tuple(
            TraceDocument(span.id, span.version, span.start, span.end)
            for span in retrieval.annotation.documents
        )
        self._writer.append(
            TraceRequest(
                arrival_s=round(retrieval.counted_at_s, 3),
                documents=documents,
                prompt_tokens=retrieval.prompt_tokens,
                output_tokens=output_tokens,
                namespace=namespace_name(retrieval.extra_key, retrieval.cache_salt),
                shared_tokens=retrieval.shared_tokens,
                shared_namespace=namespace_name(retrieval.extra_key, None),
            )
        )
