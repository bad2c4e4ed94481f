"""How often a path was used lately, remembered after its nodes have left the tree."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

HALF_LIVES = (200.0, 2_000.0, 20_000.0, 100_000.0)
"""In retrievals. The first is what a burst lasts; a document's popularity the others."""

_RATES = tuple(math.log(2) / half_life for half_life in HALF_LIVES)
# How fast the mixture follows, and how often what it has learned is published.
_LEARNING_RATE = 1 / 2_000
_EPOCH = 500


class PathHistory:
    """Uses of one path, each counted with an exponential decay, once for each half-life.

    Attributes:
        counts: Decayed uses as of `last_use`, by half-life.
        last_use: Logical time of the last use.
        expected: Requests that wait now and will use the path.
    """

    __slots__ = ("counts", "expected", "last_use")

    def __init__(self) -> None:
        self.counts = [0.0] * len(HALF_LIVES)
        self.last_use = 0
        self.expected = 0

    def record(self, now: int) -> None:
        age = now - self.last_use
        self.counts = [
            count * math.exp(-rate * age) + 1.0
            for count, rate in zip(self.counts, _RATES, strict=True)
        ]
        self.last_use = now

    def rates(self, age: float) -> list[float]:
        """Expected uses per retrieval, by half-life, `age` after the last use."""
        return [
            rate * count * math.exp(-rate * age)
            for count, rate in zip(self.counts, _RATES, strict=True)
        ]


class HalfLifeMixture:
    """How much each half-life counts, learned from which of them foresaw the uses so far.

    A use is evidence for a half-life in proportion to the rate that it predicted for the
    path (a mixture fitted by online expectation maximisation). What was learned is published
    every 500 retrievals, so that a priority changes at known times only.

    Attributes:
        weights: By half-life; they add up to 1.
    """

    def __init__(self) -> None:
        self.weights: Sequence[float] = (1 / len(HALF_LIVES),) * len(HALF_LIVES)
        self._learned = list(self.weights)

    def learn(self, history: PathHistory, now: int) -> None:
        """Take account of a use at `now` of a path with `history` before it."""
        if history.last_use:
            rates = history.rates(now - history.last_use)
            evidence = [weight * rate for weight, rate in zip(self._learned, rates, strict=True)]
            total = sum(evidence)
            if total > 0:
                self._learned = [
                    weight + _LEARNING_RATE * (part / total - weight)
                    for weight, part in zip(self._learned, evidence, strict=True)
                ]
        if now % _EPOCH == 0:
            self.weights = tuple(self._learned)


class PathHistories:
    """Histories by path, of nodes in the tree and of ghosts: paths whose nodes have left it.

    Bounded: beyond `capacity` the path whose last use is longest ago is forgotten, unless a
    node still holds its history. About 500 bytes a path, 32 MB in all.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._histories: OrderedDict[bytes, PathHistory] = OrderedDict()
        self._expected: list[PathHistory] = []
        self.mixture = HalfLifeMixture()

    def __len__(self) -> int:
        return len(self._histories)

    def record(self, path: bytes, now: int) -> PathHistory:
        """Count a use of `path` at logical time `now` and return its history."""
        history = self._histories.pop(path, None) or PathHistory()
        self._histories[path] = history
        self.mixture.learn(history, now)
        history.record(now)
        if len(self._histories) > self._capacity:
            self._histories.popitem(last=False)
        return history

    def expect(self, paths: Iterable[bytes]) -> None:
        """Let the waiting requests' `paths` be the uses that are known to come."""
        for history in self._expected:
            history.expected = 0
        known = (self._histories.get(path) for path in paths)
        self._expected = [history for history in known if history is not None]
        for history in self._expected:
            history.expected += 1

    def clear(self) -> None:
        self._histories.clear()
        self._expected.clear()
        self.mixture = HalfLifeMixture()
