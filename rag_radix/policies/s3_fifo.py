"""Three first-in-first-out queues, as ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_radix.policies.base import Clock, ReplacementPolicy
from rag_radix.statistics import NodeStatistics

# Stay of a node on probation, in passes of the main queue: the original's small queue has a
# tenth of the memory, the main one the rest. Exact in a float, so that equals stay equal.
_PROBATION = 1 / 8
_HITS_TO_MAIN = 2
_MOST_HITS = 3


@dataclass(frozen=True)
class S3Fifo(ReplacementPolicy):
    """New nodes leave soon unless they are hit twice; others stay one pass and one a hit.

    Source: Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache
    eviction", SOSP 2023. The tier's clock, which rises to the highest priority evicted,
    counts passes: a node ranked `n` above it leaves when the queue has gone round `n` times,
    and nodes of one pass leave in the order of their ids, which is that of insertion (the upper
    half of a node that is cut counts as inserted then).

    Kept: a node starts on probation and moves to the main queue on its second hit; one whose
    document is known from before, the original's ghosts, starts in the main queue; a hit in
    the main queue buys one more pass, three at most.

    Not kept: the queues have no sizes of their own. Probation lasts an eighth of a pass
    instead of taking a tenth of the memory; a hit moves the node to the present pass, and
    its hits aren't used up by the passes that they bought; ghosts are all documents whose
    frequency is remembered, at any place in the tree, rather than the latest evictions. Only
    leaves leave, so a node above others waits for them. Each tier has its own clock.
    """

    name: ClassVar[str] = "s3-fifo"

    def priority(self, statistics: NodeStatistics, clock: Clock) -> float:
        if not statistics.frequency:
            return clock.evicted
        hits = statistics.frequency - 1
        is_ghost = statistics.document_frequency > statistics.frequency
        if hits >= _HITS_TO_MAIN or is_ghost:
            return clock.evicted + 1 + min(hits, _MOST_HITS)
        return clock.evicted + _PROBATION
