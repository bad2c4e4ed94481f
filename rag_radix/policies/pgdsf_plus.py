"""PGDSF with rates of use that are learned, remembered and weighed against what they displace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rag_radix.policies.base import Clock, Rank, ReplacementPolicy, TierName
from rag_radix.statistics import NodeStatistics

# A node is ranked as of the next age of this grid, when it is ranked again: 32 retrievals and what
# follows by sqrt(2), which 181 / 128 is within 0.02%.
_AGES = [age for power in range(5, 63) for age in (1 << power, (181 << power) >> 7)]
# What loading a token back costs, of what computing it costs.
_LOAD_SHARE = 0.02
# How much less than the node itself what it displaces must be worth: a copy isn't free, and
# estimates of nearly equal nodes change places all the time.
_DISPLACED_SHARE = 0.8


@dataclass(frozen=True)
class PgdsfPlus(ReplacementPolicy):
    """`mean(cost / new tokens) x rate of use`: prefill seconds saved a token and retrieval.

    As in PGDSF the cost is that of the place. In place of a frequency that only grows and a
    clock that ages it there is an estimate of the rate of use (`ReuseModel`): the path's share
    of its topic's uses, whose counts decay at several speeds and outlive the node.

    - A node that has a host copy is worth only the load that the device saves.
    - A node goes to host only if its tokens, with those below it that would be lost too, are
      clearly worth more than what would have to leave the host for it.
    - Room there is then made by giving up host copies of what the device has as well.
    - Uses by waiting requests are certain, and count as such.
    """

    name: ClassVar[str] = "pgdsf-plus"
    uses_history: ClassVar[bool] = True
    reclaims_duplicates: ClassVar[bool] = True

    def priority(self, statistics: NodeStatistics, clock: Clock) -> float:
        return self.rank(statistics, clock).priority

    def rank(self, statistics: NodeStatistics, clock: Clock) -> Rank:
        history = statistics.history
        if history is None:
            age = clock.now - statistics.last_access
            return Rank(0.0, 0.0, clock.now + _until(age) - age)
        age = clock.now - history.topic.last_use
        until = _until(age)
        value = statistics.mean_cost_per_token_s * clock.reuse.rate(history, until)
        if statistics.has_host_copy and clock.tier is TierName.DEVICE:
            value *= _LOAD_SHARE
        return Rank(value, value, clock.now + until - age)

    def foreseen(self, statistics: NodeStatistics, clock: Clock) -> float:
        history = statistics.history
        if history is None or not history.expected:
            return 0.0
        value = statistics.mean_cost_per_token_s * history.expected
        if statistics.has_host_copy and clock.tier is TierName.DEVICE:
            value *= _LOAD_SHARE
        return value

    def admits(
        self,
        kept: Sequence[NodeStatistics],
        displaced: Sequence[NodeStatistics],
        clock: Clock,
    ) -> bool:
        if not displaced:
            return True
        return self._worth(displaced, clock) < _DISPLACED_SHARE * self._worth(kept, clock)

    def _worth(self, nodes: Sequence[NodeStatistics], clock: Clock) -> float:
        return sum(
            node.tokens * (self.priority(node, clock) + self.foreseen(node, clock))
            for node in nodes
        )


def _until(age: int) -> int:
    """The smallest age of the grid above `age`."""
    return _AGES[bisect_right(_AGES, age)]
