"""Least recently used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_radix.statistics import NodeStatistics


@dataclass(frozen=True)
class Lru:
    """The node whose last retrieval is longest ago leaves first."""

    name: ClassVar[str] = "lru"

    def priority(self, statistics: NodeStatistics, clock: float) -> float:
        return float(statistics.last_access)
