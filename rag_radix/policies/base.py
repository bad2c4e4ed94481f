"""The contract of a replacement policy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, NamedTuple

from rag_radix.history import ReuseModel
from rag_radix.statistics import NodeStatistics


class TierName(IntEnum):
    """Index of a tier in a node's `ranks`."""

    DEVICE = 0
    HOST = 1
    DUPLICATE = 2  # host copies of nodes that are on the device


@dataclass(slots=True)
class Clock:
    """What a policy may know beside the statistics of a node; one for each tier.

    Attributes:
        now: Logical time: retrievals served so far.
        evicted: Highest priority evicted from the tier so far.
        largest_frequency: Most retrievals of one node or document so far, if the policy asks.
        largest_tokens: Tokens of the largest node used so far, likewise.
        tier: The tier.
        reuse: What a node's history says about its next use.
        rescaled_at: When the frequency scale changes, or last changed.
    """

    now: int = 0
    evicted: float = 0.0
    largest_frequency: int = 1
    largest_tokens: int = 1
    tier: TierName = TierName.DEVICE
    reuse: ReuseModel = field(default_factory=ReuseModel)
    rescaled_at: int = 0
    _scale: int = 1
    _next_scale: int = 1

    @property
    def notice(self) -> int:
        """Retrievals, a sixteenth of all so far, by which a change of scale is announced."""
        return max(1, self.now // 16)

    def frequency_scale(self, time: int) -> int:
        """The largest frequency by which others are measured at `time`, at most `notice` from
        now. A larger one replaces it with notice, so that ranks can be given until then."""
        return self._scale if time < self.rescaled_at else self._next_scale

    def observe(self, statistics: NodeStatistics) -> None:
        """Take account of a node's statistics before it is ranked."""
        if (uses := statistics.uses) > self.largest_frequency:
            self.largest_frequency = uses
        if statistics.tokens > self.largest_tokens:
            self.largest_tokens = statistics.tokens
        if self._next_scale < self.largest_frequency and self.rescaled_at <= self.now:
            self._scale, self._next_scale = self._next_scale, self.largest_frequency
            self.rescaled_at = self.now + self.notice


class Rank(NamedTuple):
    """Where a node stands in a tier's eviction order until it is used again.

    Attributes:
        priority: As of now.
        floor: The priority isn't below this until `until`. A policy whose priorities stay as
            they are gives the priority itself, and the tier doesn't ask again before `until`.
        until: Logical time from which `floor` doesn't hold any more.
    """

    priority: float
    floor: float
    until: float = math.inf


class ReplacementPolicy(ABC):
    """Ranks nodes for eviction; the lowest priority leaves first, ties by node id.

    A policy is a pure function of a node's statistics and its tier's clock: it sees no
    tensors, no SGLang and no wall time, so every tensor-parallel rank decides alike, and so
    does a replay of the same requests.

    Most policies define `priority` alone, which is taken when a node is used. One whose
    priorities change with time overrides `rank` as well: it says how long a rank holds.
    """

    name: ClassVar[str]
    uses_history: ClassVar[bool] = False
    """Whether it reads `NodeStatistics.history`, which costs memory and a hash a prompt."""
    uses_largest: ClassVar[bool] = False
    """Whether it measures nodes by the largest, which the tiers' clocks keep track of for it."""
    reclaims_duplicates: ClassVar[bool] = False
    """Whether host copies of nodes that are on the device leave the host first, so that a
    node is copied again when it leaves the device after all; and whether a node's priority on
    the device depends on having such a copy."""

    @abstractmethod
    def priority(self, statistics: NodeStatistics, clock: Clock) -> float:
        """Priority of a node at `clock`; nodes that are used get it then."""

    def rank(self, statistics: NodeStatistics, clock: Clock) -> Rank:
        priority = self.priority(statistics, clock)
        return Rank(priority, priority)

    def foreseen(self, statistics: NodeStatistics, clock: Clock) -> float:
        """What uses that are known to come add to a node's priority now; never negative."""
        return 0.0

    def admits(
        self,
        kept: Sequence[NodeStatistics],
        displaced: Sequence[NodeStatistics],
        clock: Clock,
    ) -> bool:
        """Whether to copy a node to host.

        Args:
            kept: The node, and what hangs below it on host and would be dropped with it.
            displaced: What would have to leave the host to make room; empty when there is.
            clock: The host tier's.
        """
        return True
