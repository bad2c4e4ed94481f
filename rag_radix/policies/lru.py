"""Least recently used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_radix.policies.base import Clock, ReplacementPolicy
from rag_radix.statistics import NodeStatistics


@dataclass(frozen=True)
class Lru(ReplacementPolicy):
    """The node whose last retrieval is longest ago leaves first."""

    name: ClassVar[str] = "lru"

    def priority(self, statistics: NodeStatistics, clock: Clock) -> float:
        return float(statistics.last_access)
