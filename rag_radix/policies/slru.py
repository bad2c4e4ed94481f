"""Segmented least recently used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_radix.errors import ConfigError
from rag_radix.policies.base import Clock, ReplacementPolicy
from rag_radix.statistics import NodeStatistics

# More retrievals than a server sees, and exact in a float beside their time.
_PROTECTED = 2.0**52


@dataclass(frozen=True)
class Slru(ReplacementPolicy):
    """Nodes on probation leave before protected ones, least recently used first in both.

    A node is protected from its second retrieval on, for as long as it stays in the tree. As
    SGLang's strategy of that name, which, unlike the original (Karedla, Love and Wherry,
    "Caching strategies to improve disk system performance", 1994), doesn't bound the
    protected segment: nothing goes back on probation.

    Attributes:
        protected_threshold: Retrievals since its insertion that protect a node.

    Raises:
        ConfigError: `protected_threshold` isn't a whole number of at least 1.
    """

    protected_threshold: int = 2
    name: ClassVar[str] = "slru"

    def __post_init__(self) -> None:
        if type(self.protected_threshold) is not int or self.protected_threshold < 1:
            raise ConfigError(
                f"protected_threshold={self.protected_threshold!r} in "
                "--radix-eviction-policy-config: give a whole number of at least 1"
            )

    def priority(self, statistics: NodeStatistics, clock: Clock) -> float:
        protected = statistics.frequency >= self.protected_threshold
        return protected * _PROTECTED + statistics.last_access
