"""How a trace's retrievals are spread over its documents, and what caching all would take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rag_radix.replay.trace import TraceRequest


@dataclass(frozen=True)
class Skew:
    """Retrievals of a trace's documents, most retrieved first; versions count as one document.

    Attributes:
        retrievals: [documents] how often each was retrieved, descending.
    """

    retrievals: tuple[int, ...]

    def share_of_top(self, part: float) -> float:
        """Share of all retrievals that the most retrieved `part` of the documents get."""
        top = round(part * len(self.retrievals))
        return sum(self.retrievals[:top]) / max(sum(self.retrievals), 1)

    def curve(self, points: int = 200) -> tuple[list[float], list[float]]:
        """Shares of documents, and of the retrievals that so many of the top ones get."""
        shares = np.concatenate([[0.0], np.cumsum(self.retrievals)]) / max(sum(self.retrievals), 1)
        parts = np.linspace(0, 1, points)
        places = np.linspace(0, 1, len(shares))
        return parts.tolist(), np.interp(parts, places, shares).tolist()


def skew_of(requests: Sequence[TraceRequest]) -> Skew:
    """The skew of the documents that occur in `requests`; others of the corpus are unknown."""
    counts = Counter(
        (request.namespace_at(document.start), document.id)
        for request in requests
        for document in request.documents
    )
    return Skew(tuple(sorted(counts.values(), reverse=True)))


def footprint_tokens(requests: Sequence[TraceRequest]) -> int:
    """Tokens of all documents at their places: each counts once for every text that it stood
    behind, since it is cached behind that text only."""
    paths: dict[object, int] = {}
    total = 0
    for request in requests:
        path: object = None
        end = 0
        for document in request.documents:
            namespace = request.namespace_at(document.start)
            key = (path, namespace, document.start - end, document.id, document.version)
            if key not in paths:
                paths[key] = len(paths)
                total += document.end - document.start
            path, end = paths[key], document.end
    return total
