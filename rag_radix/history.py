"""How often a path was used lately, remembered after its nodes have left the tree."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

HALF_LIVES = (150.0, 3_000.0, 50_000.0)
"""In retrievals: about what a burst, a trend and a document's popularity last."""

_DECAYS = np.exp2(-1 / np.array(HALF_LIVES))
_GROUP_ENDS = (1, 2, 4, 8)
# Evidence is forgotten by half in so many retrievals, and published every so many.
_EVIDENCE_HALF_LIFE = 1_000.0
_PUBLISHED_EVERY = 500
# Uses that the model is as sure of at first as of evidence.
_PRIOR_USES = 10.0


class Kind(IntEnum):
    """What a path ends with."""

    TAIL = 0
    PREFIX = 1  # what prompts begin with, above their documents
    DOCUMENT = 2


_GROUPS = Kind.DOCUMENT + len(_GROUP_ENDS) + 1


class PathHistory:
    """Uses of one path, each counted with an exponential decay, once for each half-life.

    Attributes:
        counts: Decayed uses as of `last_use`, by half-life.
        uses: All of them.
        last_use: Logical time of the last one.
        expected: Uses per retrieval that requests will make which wait now.
        group: Paths that are used alike: by kind, documents by their number of uses.
        is_predicted: Whether the model counts on uses of it.
    """

    __slots__ = ("counts", "expected", "group", "is_predicted", "last_use", "uses")

    def __init__(self) -> None:
        self.counts = (0.0,) * len(HALF_LIVES)
        self.uses = 0
        self.last_use = 0
        self.expected = 0.0
        self.group = 0
        self.is_predicted = False

    def record(self, now: int, kind: Kind = Kind.DOCUMENT) -> None:
        """Count a use at logical time `now`."""
        self.counts = tuple(count + 1.0 for count in self.counts_at(now))
        self.uses += 1
        self.last_use = now
        self.group = int(kind)
        if kind is Kind.DOCUMENT:
            self.group += bisect_left(_GROUP_ENDS, self.uses)

    def counts_at(self, now: int) -> tuple[float, ...]:
        """`counts`, decayed until `now`."""
        age = now - self.last_use
        return tuple(
            count * 2.0 ** (-age / half_life)
            for count, half_life in zip(self.counts, HALF_LIVES, strict=True)
        )


class ReuseModel:
    """What the decayed counts of a path say about its next use, learned from what they said
    before.

    The rate of use is `sum over half-lives of weight x count`, with weights for each group of
    paths. A use is attributed to the half-lives in proportion to what they predicted; a weight
    is the uses attributed by the uses predicted, both forgotten exponentially. So what was
    used once is known to come back less often than its count says, bursts are believed while
    there are bursts, and rates are true to scale.

    Attributes:
        rates: Uses per retrieval and unit of decayed count, by group and half-life.
    """

    def __init__(self) -> None:
        shape = (_GROUPS, len(HALF_LIVES))
        self._attributed = np.zeros(shape)
        self._predicted = np.zeros(shape)
        self._counts = np.zeros(shape)  # of all paths, by group
        self._forget = 2.0 ** (-1 / _EVIDENCE_HALF_LIFE)
        self._published_at = 0
        self._publish(1)

    def _publish(self, now: int) -> None:
        prior = _PRIOR_USES / len(HALF_LIVES)
        self._weights = (self._attributed + prior) / (self._predicted + _PRIOR_USES)
        self.rates: list[tuple[float, ...]] = [
            tuple(row) for row in (self._weights * self._scale(now)).tolist()
        ]
        self._published_at = now

    @staticmethod
    def _scale(now: int) -> np.ndarray:
        """What makes a decayed count a share of all uses in the `now` retrievals so far."""
        scale: np.ndarray = (1 - _DECAYS) / (1 - _DECAYS**now)
        return scale

    def advance(self, now: int) -> None:
        """Logical time moves on to `now`."""
        self._counts *= _DECAYS
        self._attributed *= self._forget
        self._predicted *= self._forget
        self._predicted += self._counts * self._scale(now)
        # More often while there is little to go by.
        if now - self._published_at >= min(_PUBLISHED_EVERY, self._published_at):
            self._publish(now)

    def use(self, history: PathHistory, now: int, kind: Kind) -> None:
        """Learn from a use at `now`, and record it in `history`."""
        if history.is_predicted:
            counts = history.counts_at(now)
            self._counts[history.group] -= counts
            predicted = [
                rate * count for rate, count in zip(self.rates[history.group], counts, strict=True)
            ]
            if (total := sum(predicted)) > 0:
                self._attributed[history.group] += np.array(predicted) / total
        history.record(now, kind)
        history.is_predicted = True
        self._counts[history.group] += history.counts

    def forget(self, history: PathHistory, now: int) -> None:
        """Expect no use of a path whose history is given up, until a node that still holds it
        is used."""
        history.is_predicted = False
        self._counts[history.group] -= history.counts_at(now)


class PathHistories:
    """Histories by path, of documents in the tree and of ghosts: those that have left it.

    Bounded: beyond `capacity` the path whose last use is longest ago is forgotten, unless a
    node still holds its history. About 500 bytes a path, 32 MB in all.

    Attributes:
        model: Learned from all of them.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._histories: OrderedDict[bytes, PathHistory] = OrderedDict()
        self._expected: list[PathHistory] = []
        self.model = ReuseModel()

    def __len__(self) -> int:
        return len(self._histories)

    def record(self, path: bytes, now: int) -> PathHistory:
        """Count a use of the document at the end of `path` and return the path's history."""
        history = self._histories.pop(path, None) or PathHistory()
        self._histories[path] = history
        self.model.use(history, now, Kind.DOCUMENT)
        if len(self._histories) > self._capacity:
            _, forgotten = self._histories.popitem(last=False)
            self.model.forget(forgotten, now)
        return history

    def record_unnamed(self, history: PathHistory | None, kind: Kind, now: int) -> PathHistory:
        """Count a use by a request that names no document there. Where nobody has named one,
        the history lives as long as its node."""
        history = history or PathHistory()
        if history.last_use != now or not history.uses:  # several nodes may share it
            named = history.group >= Kind.DOCUMENT
            self.model.use(history, now, Kind.DOCUMENT if named else kind)
        return history

    def expect(self, waiting: Sequence[Sequence[bytes]]) -> None:
        """Let the uses that are known to come be those of the waiting requests' paths, all of
        them within as many retrievals."""
        for history in self._expected:
            history.expected = 0.0
        known = (self._histories.get(path) for paths in waiting for path in paths)
        self._expected = [history for history in known if history is not None]
        for history in self._expected:
            history.expected += 1 / len(waiting)

    def clear(self) -> None:
        self._histories.clear()
        self._expected.clear()
        self.model = ReuseModel()
