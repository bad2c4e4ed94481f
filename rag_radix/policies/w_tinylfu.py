"""Recency for what comes in, frequency for what stays: W-TinyLFU over two tiers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rag_radix.history import HALF_LIVES
from rag_radix.policies.base import Clock, ReplacementPolicy
from rag_radix.policies.slru import Slru
from rag_radix.statistics import NodeStatistics

_SEGMENTS = Slru()


@dataclass(frozen=True)
class WTinyLfu(ReplacementPolicy):
    """Leaves by segmented recency; goes to host only if used more than what it displaces.

    Source: Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission
    policy", ACM Transactions on Storage, 2017; for nodes of unequal size Einziger, Eytan,
    Friedman and Manes, "Lightweight robust size aware cache management", 2022.

    Kept: everything enters a window in front, here the device tier, which must hold what is
    being computed in any case; what leaves the window enters the main part, here the host,
    only against its victims, by a frequency that ages and outlives the node; the main part
    is a segmented LRU. Victims are as many as it takes to make room, together; uses count by
    the tokens that they read.

    Not kept: the window's one per cent, the limit of the protected segment, and the sketch:
    uses are counted by path and decay smoothly, by half in 50,000 retrievals, instead of being
    halved all at once after a number of them. The device ranks its leaves by the same
    segments. Without a host tier this is `slru`.
    """

    name: ClassVar[str] = "w-tinylfu"
    uses_history: ClassVar[bool] = True

    def priority(self, statistics: NodeStatistics, clock: Clock) -> float:
        return _SEGMENTS.priority(statistics, clock)

    def admits(
        self,
        kept: Sequence[NodeStatistics],
        displaced: Sequence[NodeStatistics],
        clock: Clock,
    ) -> bool:
        return not displaced or _used_tokens(kept, clock) > _used_tokens(displaced, clock)


def _used_tokens(nodes: Sequence[NodeStatistics], clock: Clock) -> float:
    """Tokens read from `nodes` lately."""
    return sum(node.tokens * _lately(node, clock.now) for node in nodes)


def _lately(statistics: NodeStatistics, now: int) -> float:
    history = statistics.history
    if history is None:
        uses, last_use = float(statistics.frequency), statistics.last_access
    else:
        uses, last_use = history.count, history.last_use
    return uses * math.exp2((last_use - now) / HALF_LIVES[-1])
