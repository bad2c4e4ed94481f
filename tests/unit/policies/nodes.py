"""Statistics and histories of nodes that were used."""

from __future__ import annotations

from rag_radix.history import Kind, PathHistory, Topic
from rag_radix.statistics import NodeStatistics


def used(frequency=1, document_frequency=0, cost=0.5, samples=1, last_access=0, tokens=100, **more):
    return NodeStatistics(
        frequency, document_frequency, cost, samples, last_access, tokens=tokens, **more
    )


def history_of(*times):
    history = PathHistory(Topic())
    for now in times:
        use(history, now)
    return history


def use(history, now):
    history.topic.record(now)
    history.record(Kind.DOCUMENT)
