"""The contract of a replacement policy."""

from __future__ import annotations

from typing import ClassVar, Protocol

from rag_radix.statistics import NodeStatistics


class ReplacementPolicy(Protocol):
    """Ranks nodes for eviction; the lowest priority leaves first, ties by node id.

    A policy is a pure function of a node's statistics and its tier's clock: it sees no
    tensors, no SGLang and no wall time, so every tensor-parallel rank decides alike.
    The tier raises its clock to the priority of each victim and never lowers it.
    """

    name: ClassVar[str]

    def priority(self, statistics: NodeStatistics, clock: float) -> float:
        """Priority of a node used now, in a tier whose clock stands at `clock`."""
        ...
