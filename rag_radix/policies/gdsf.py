"""Greedy-dual-size-frequency, without a prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_radix.policies.base import Clock, ReplacementPolicy
from rag_radix.statistics import NodeStatistics


@dataclass(frozen=True)
class Gdsf(ReplacementPolicy):
    """`clock + frequency x cost / size`, with what a document costs by itself.

    Source: Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency
    caching policy", HP Labs, 1998. The frequency counts a node's retrievals since it was
    inserted, and the clock is the highest priority evicted so far.

    Computing a document by itself is taken to cost time in proportion to its tokens, so that
    `cost / size` is the same for all: what goes beyond that is what the tokens before it and
    the rest of its batch add, which a policy without a prefix doesn't know. (With that cost
    the formula is also known as LFU with dynamic aging, the variant for byte hit rates: a hit
    on a long document counts for as much more as it takes more memory.)

    `pgdsf` differs in two things: it measures the cost per token of each node, behind the
    prefixes at which it was computed, and its frequency survives the node unless its setting
    says "node".
    """

    name: ClassVar[str] = "gdsf"

    def priority(self, statistics: NodeStatistics, clock: Clock) -> float:
        return clock.evicted + statistics.frequency
