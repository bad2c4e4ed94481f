"""Least frequently used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_radix.policies.base import Clock, ReplacementPolicy
from rag_radix.statistics import NodeStatistics

# More retrievals than a server sees, and exact in a float beside two million uses.
_LONG_TIME = 2**32


@dataclass(frozen=True)
class Lfu(ReplacementPolicy):
    """The node that was retrieved least often since it was inserted leaves first; of those
    retrieved equally often, the one whose last retrieval is longest ago.

    Frequencies never age, and end with the node. As SGLang's strategy of that name.
    """

    name: ClassVar[str] = "lfu"

    def priority(self, statistics: NodeStatistics, clock: Clock) -> float:
        return statistics.frequency + statistics.last_access / _LONG_TIME
