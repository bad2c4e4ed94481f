"""Prefix-aware greedy-dual-size-frequency, the policy of the RAGCache paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rag_radix.errors import ConfigError
from rag_radix.policies.base import Clock, ReplacementPolicy
from rag_radix.statistics import NodeStatistics


@dataclass(frozen=True)
class Pgdsf(ReplacementPolicy):
    """`clock + frequency x mean(cost / new tokens)`.

    The cost per token depends on the prefix a document was computed behind, which is what
    makes the policy prefix-aware. Source: RAGCache, arXiv:2404.12457, section 5.1; the
    division by new tokens is in its formula and missing from its printed algorithm.

    Attributes:
        frequency: "document" counts the retrievals of a document wherever it stood and
            survives its eviction; "node" counts those of one place since it was inserted.

    Raises:
        ConfigError: `frequency` is neither.
    """

    frequency: Literal["document", "node"] = "document"
    name: ClassVar[str] = "pgdsf"

    def __post_init__(self) -> None:
        if self.frequency not in ("document", "node"):
            raise ConfigError(
                f"frequency={self.frequency!r} in --radix-eviction-policy-config: "
                "use 'document' or 'node'"
            )

    def priority(self, statistics: NodeStatistics, clock: Clock) -> float:
        # A head that several documents share is read at least as often as each of them.
        uses = statistics.uses if self.frequency == "document" else statistics.frequency
        return clock.evicted + uses * statistics.mean_cost_per_token_s
