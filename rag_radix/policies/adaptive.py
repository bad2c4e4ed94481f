"""A weighted sum of frequency, recency and size."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from rag_radix.errors import ConfigError
from rag_radix.policies.base import Clock, Rank, ReplacementPolicy
from rag_radix.statistics import NodeStatistics

# Shortest time, as a share of all so far, for which a rank is given.
_SHORTEST = 1 / 1024
# Of the largest possible score: more than what rounding does to one.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Adaptive(ReplacementPolicy):
    """`alpha x frequency + beta x recency - gamma x size`, each from 0 to 1, or about that.

    Source: the adaptive policy of the RAGCache article, with its weights. The article doesn't
    print how it brings the three to one scale; here

    - frequency is the node's uses by the most uses of any node, `Clock.frequency_scale`, so
      above 1 for a node that is used more until the scale has followed;
    - recency is the logical time of the last use by the present one;
    - size is the node's tokens by those of the largest node.

    Scores change with time, and their order with them, so a node is ranked for a while: at
    one moment all scores may be multiplied by the logical time without changing their order,
    and then move along straight lines between two changes of the frequency scale, which are
    announced. A larger node that turns up only raises them. The further a node is from
    being the next victim, the longer its rank holds.

    Attributes:
        alpha: Weight of frequency.
        beta: Weight of recency.
        gamma: Weight of size.

    Raises:
        ConfigError: A weight isn't a number of at least 0.
    """

    alpha: float = 0.5
    beta: float = 0.3
    gamma: float = 0.2
    name: ClassVar[str] = "adaptive"
    uses_largest: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for weight in fields(self):
            value = getattr(self, weight.name)
            if type(value) not in (int, float) or not 0 <= value < float("inf"):
                raise ConfigError(
                    f"{weight.name}={value!r} in --radix-eviction-policy-config: "
                    "give a number of at least 0"
                )

    def priority(self, statistics: NodeStatistics, clock: Clock) -> float:
        """The score times the logical time."""
        return self._score(statistics, clock, clock.now)

    def _score(self, statistics: NodeStatistics, clock: Clock, time: int) -> float:
        frequency = statistics.uses / clock.frequency_scale(time)
        size = statistics.tokens / clock.largest_tokens
        return (
            self.alpha * frequency - self.gamma * size
        ) * time + self.beta * statistics.last_access

    def rank(self, statistics: NodeStatistics, clock: Clock) -> Rank:
        now, rescaled = clock.now, clock.rescaled_at
        priority = self.priority(statistics, clock)
        # Halfway down to the latest victims it is time to look again.
        spare = max(0.0, priority - clock.evicted) / 2
        frequency = statistics.uses / clock.frequency_scale(now)
        fall = self.gamma * statistics.tokens / clock.largest_tokens - self.alpha * frequency
        horizon = clock.notice
        if fall * horizon > spare:
            horizon = max(1, int(max(spare / fall, now * _SHORTEST)))
        until = now + horizon
        # Straight lines are lowest at one of their ends.
        floor = min(priority, self._score(statistics, clock, until - 1))
        if now < rescaled < until:
            after = self._score(statistics, clock, rescaled)
            if after < priority - spare:
                until = rescaled
                floor = min(priority, self._score(statistics, clock, until - 1))
            else:
                floor = min(floor, after)
        rounding = (self.alpha + self.beta + self.gamma) * until * _ROUNDING
        return Rank(priority, floor - rounding, until)
