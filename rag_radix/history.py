"""How often a path and its topic were used lately, remembered after nodes have left the tree."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import islice

import numpy as np

HALF_LIVES = (100.0, 3_000.0, 50_000.0)
"""In retrievals: about what a burst, a trend and a document's popularity last."""

_DECAYS = tuple(2.0 ** (-1 / half_life) for half_life in HALF_LIVES)
# Paths are used alike when they were used once or their topic about as often lately, counted
# with the second half-life, and when they have a like share of its uses.
_COUNT_ENDS = (2.5, 5.0)
_SHARE_ENDS = (0.2, 0.5)
# Evidence is forgotten by half in so many retrievals, and published every so many.
_EVIDENCE_HALF_LIFE = 1_000.0
_PUBLISHED_EVERY = 500
# Uses that the model is as sure of at first as of evidence.
_PRIOR_USES = 10.0


@lru_cache(maxsize=256)
def _decays_until(age: int) -> tuple[float, ...]:
    """What is left of a decayed count after `age` retrievals, by half-life."""
    return tuple(2.0 ** (-age / half_life) for half_life in HALF_LIVES)


class Kind(IntEnum):
    """What a path ends with."""

    TAIL = 0
    PREFIX = 1  # what prompts begin with, above their documents
    DOCUMENT = 2


_LEVELS, _SHARES = 2 + len(_COUNT_ENDS), 1 + len(_SHARE_ENDS)
_NEW_FIRST = Kind.DOCUMENT + _LEVELS * _SHARES  # the first document of a topic just met
_GROUPS = _NEW_FIRST + 1


class Topic:
    """What requests are about that retrieve the same documents, in whatever order and choice.

    Attributes:
        counts: Requests about it as of `last_use`, each counted with an exponential decay,
            once for each half-life.
        uses: All of them.
        last_use: Logical time of the last one.
        path_uses: Uses of its paths that the model counts on, by group.
    """

    __slots__ = ("counts", "last_use", "path_uses", "uses")

    def __init__(self) -> None:
        self.counts = (0.0,) * len(HALF_LIVES)
        self.uses = 0
        self.last_use = 0
        self.path_uses = [0] * _GROUPS

    def record(self, now: int) -> tuple[float, ...]:
        """Count a use at logical time `now`; return `counts`, decayed until then, without it."""
        earlier = self.counts_at(now)
        self.counts = tuple([count + 1.0 for count in earlier])
        self.uses += 1
        self.last_use = now
        return earlier

    def counts_at(self, now: int) -> tuple[float, ...]:
        """`counts`, decayed until `now`."""
        age = now - self.last_use
        if age == 0:
            return self.counts
        return tuple(
            [
                count * 2.0 ** (-age / half_life)
                for count, half_life in zip(self.counts, HALF_LIVES, strict=True)
            ]
        )


class PathHistory:
    """Uses of one path.

    Attributes:
        topic: What it is used for.
        uses: How often it was.
        last_use: Logical time of the last one.
        count: Uses as of then, each decayed with the longest half-life.
        expected: Uses per retrieval that requests will make which wait now.
        group: Paths that are used alike.
        is_predicted: Whether the model counts on uses of it.
        path: The path, where it ends with a document.
    """

    __slots__ = ("count", "expected", "group", "is_predicted", "last_use", "path", "topic", "uses")

    def __init__(self, topic: Topic, path: bytes | None = None) -> None:
        self.topic = topic
        self.path = path
        self.uses = 0
        self.last_use = 0
        self.count = 0.0
        self.expected = 0.0
        self.group = 0
        self.is_predicted = False

    @property
    def share(self) -> float:
        """Part of the topic's uses."""
        return self.uses / self.topic.uses

    def record(self, kind: Kind, *, is_first: bool = False) -> None:
        """Count a use in the last one of its topic.

        Args:
            kind: What the path ends with.
            is_first: Whether that is the first document of the prompt.
        """
        now = self.topic.last_use
        self.count = 1.0 + self.count * 2.0 ** ((self.last_use - now) / HALF_LIVES[-1])
        self.last_use = now
        self.uses += 1
        self.group = int(kind)
        if kind is not Kind.DOCUMENT:
            return
        if is_first and self.topic.uses == 1:
            self.group = _NEW_FIRST
            return
        level = 0 if self.uses == 1 else 1 + bisect_left(_COUNT_ENDS, self.topic.counts[1])
        self.group += _SHARES * level + bisect_left(_SHARE_ENDS, self.share)


class ReuseModel:
    """What the decayed counts of a topic say about the next use of its paths, learned from what
    they said before.

    The rate of use of a path is its share of the topic's uses x `sum over half-lives of weight
    x count`, with weights for each group of paths. A use is attributed to the half-lives in
    proportion to what they predicted; a weight is the uses attributed by the uses predicted,
    both forgotten exponentially. So what was used once is known to come back less often than
    its count says, bursts are believed while there are bursts, and rates are true to scale.

    Attributes:
        rates: Uses per retrieval and unit of decayed count, by group and half-life.
    """

    def __init__(self) -> None:
        # By group and half-life; so few numbers that NumPy would take longer.
        self._attributed = _zeros()
        self._predicted = _zeros()
        self._counts = _zeros()  # share x count of all paths
        self._forget = 2.0 ** (-1 / _EVIDENCE_HALF_LIFE)
        self._published_at = 0
        self._publish(1)

    def rate(self, history: PathHistory, age: int) -> float:
        """Uses per retrieval when the topic's last use is `age` retrievals ago, an age of which
        there are few."""
        topic = history.topic
        # Written out, since this is asked dozens of times for a request.
        weight0, weight1, weight2 = self.rates[history.group]
        count0, count1, count2 = topic.counts
        decay0, decay1, decay2 = _decays_until(age)
        rate = weight0 * count0 * decay0 + weight1 * count1 * decay1 + weight2 * count2 * decay2
        return history.uses / topic.uses * rate

    def _publish(self, now: int) -> None:
        prior, scales = _PRIOR_USES / len(HALF_LIVES), self._scales(now)
        self.rates: list[tuple[float, ...]] = [
            tuple(
                (uses + prior) / (expected + _PRIOR_USES) * scale
                for uses, expected, scale in zip(attributed, predicted, scales, strict=True)
            )
            for attributed, predicted in zip(self._attributed, self._predicted, strict=True)
        ]
        self._published_at = now

    @staticmethod
    def _scales(now: int) -> list[float]:
        """By half-life, what makes a decayed count a share of all uses in the `now` retrievals so
        far."""
        return [(1 - decay) / (1 - decay**now) for decay in _DECAYS]

    def advance(self, now: int) -> None:
        """Logical time moves on to `now`."""
        forget, scales = self._forget, self._scales(now)
        for counts, attributed, predicted in zip(
            self._counts, self._attributed, self._predicted, strict=True
        ):
            for index, (decay, scale) in enumerate(zip(_DECAYS, scales, strict=True)):
                counts[index] *= decay
                attributed[index] *= forget
                predicted[index] = predicted[index] * forget + counts[index] * scale
        # More often while there is little to go by.
        if now - self._published_at >= min(_PUBLISHED_EVERY, self._published_at):
            self._publish(now)

    def use_topic(self, topic: Topic, now: int) -> None:
        """Record a use of `topic`, of which its paths are expected to keep their shares."""
        uses, counts = max(topic.uses, 1), topic.record(now)
        gained = [
            count / topic.uses - earlier / uses
            for count, earlier in zip(topic.counts, counts, strict=True)
        ]
        for group, path_uses in enumerate(topic.path_uses):
            if path_uses:
                _add(self._counts[group], path_uses, gained)

    def use(self, history: PathHistory, now: int, kind: Kind, *, is_first: bool = False) -> None:
        """Learn from a use of a path at `now`, and record it; that of its topic is recorded."""
        if history.is_predicted:
            self._expect(history, now, -1)
            predicted = [
                rate * (count - 1.0)  # as it was before this use
                for rate, count in zip(self.rates[history.group], history.topic.counts, strict=True)
            ]
            if (total := sum(predicted)) > 0:
                shares = [each / total for each in predicted]
                _add(self._attributed[history.group], 1, shares)
        history.record(kind, is_first=is_first)
        history.is_predicted = True
        self._expect(history, now, 1)

    def forget(self, history: PathHistory, now: int) -> None:
        """Expect no use of a path whose history is given up, until a node that still holds it
        is used."""
        history.is_predicted = False
        self._expect(history, now, -1)

    def count_on(self, history: PathHistory, now: int) -> None:
        """Expect uses of a path that is as it was in an earlier server."""
        self._expect(history, now, 1)

    def learned(self) -> list[list[list[float]]]:
        """What `learn_from` takes."""
        return [[[*row] for row in each] for each in (self._attributed, self._predicted)]

    def learn_from(self, learned: Sequence[Sequence[Sequence[float]]], now: int) -> None:
        """Go on with what an earlier server has `learned`, at logical time `now`.

        Raises:
            ValueError: It isn't that.
        """
        attributed, predicted = (np.array(each, dtype=float) for each in learned)
        shape = np.shape(self._attributed)
        for each in (attributed, predicted):
            if each.shape != shape or not (np.isfinite(each) & (each >= 0)).all():
                raise ValueError("the evidence isn't one of finite numbers by group and half-life")
        self._attributed, self._predicted = attributed.tolist(), predicted.tolist()
        self._publish(max(now, 1))

    def _expect(self, history: PathHistory, now: int, sign: int) -> None:
        """Count on uses of the path as it is, or no longer."""
        topic = history.topic
        topic.path_uses[history.group] += sign * history.uses
        _add(self._counts[history.group], sign * history.share, topic.counts_at(now))


def _zeros() -> list[list[float]]:
    return [[0.0] * len(HALF_LIVES) for _ in range(_GROUPS)]


def _add(row: list[float], factor: float, values: Iterable[float]) -> None:
    """Add `factor` times `values`."""
    for index, value in enumerate(values):
        row[index] += factor * value


class PathHistories:
    """Histories by path, of documents in the tree and of ghosts: those that have left it, and
    the topics of documents.

    Bounded: beyond `capacity` the path whose last use is longest ago is forgotten, unless a
    node still holds its history, and so is the topic of a document. Measured: 810 bytes a
    path where each is of a topic of its own, 53 MB in all.

    Attributes:
        model: Learned from all of them.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._histories: OrderedDict[bytes, PathHistory] = OrderedDict()
        self._topics: OrderedDict[Hashable, Topic] = OrderedDict()
        self._expected: list[PathHistory] = []
        self.model = ReuseModel()

    def __len__(self) -> int:
        return len(self._histories)

    def use_topic(self, documents: Sequence[Hashable], first_path: bytes, now: int) -> Topic:
        """Count a request for `documents` as a use of its topic.

        That is the topic of the path to the first document, if it is known; otherwise, what
        one of the documents was last retrieved for, the most recent of these; else a new one.
        """
        if (history := self._histories.get(first_path)) is not None:
            topic = history.topic
        else:
            known = [self._topics[each] for each in documents if each in self._topics]
            topic = max(known, key=lambda each: each.last_use) if known else Topic()
        for document in documents:
            self._topics[document] = topic
            self._topics.move_to_end(document)
            if len(self._topics) > self._capacity:
                self._topics.popitem(last=False)
        self.model.use_topic(topic, now)
        return topic

    def record(self, path: bytes, topic: Topic, now: int, *, is_first: bool = False) -> PathHistory:
        """Count a use of the document at the end of `path`, by a request about `topic`, and
        return the path's history; a path that belonged to another topic begins anew.

        Args:
            path: The path.
            topic: What the request is about, as `use_topic` has it.
            now: Logical time.
            is_first: Whether the document is the first of the prompt.
        """
        history = self._histories.pop(path, None)
        if history is not None and history.topic is not topic:
            self.model.forget(history, now)
            history = None
        history = history or PathHistory(topic, path)
        self._histories[path] = history
        self.model.use(history, now, Kind.DOCUMENT, is_first=is_first)
        if len(self._histories) > self._capacity:
            _, forgotten = self._histories.popitem(last=False)
            self.model.forget(forgotten, now)
        return history

    def record_unnamed(self, history: PathHistory | None, kind: Kind, now: int) -> PathHistory:
        """Count a use by a request that names no document there. Where nobody has named one,
        the history lives as long as its node."""
        history = history or PathHistory(Topic())
        if history.topic.last_use != now or not history.uses:  # several nodes may share it
            self.model.use_topic(history.topic, now)
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

    def get(self, path: bytes) -> PathHistory | None:
        return self._histories.get(path)

    def latest(self, count: int) -> tuple[list[PathHistory], list[tuple[Hashable, Topic]]]:
        """Of paths and of documents' topics the `count` that were last used, the last one last."""
        histories = list(islice(reversed(self._histories.values()), count))
        topics = list(islice(reversed(self._topics.items()), count))
        return histories[::-1], topics[::-1]

    def restore(
        self,
        histories: Sequence[PathHistory],
        topics: Sequence[tuple[Hashable, Topic]],
        now: int,
    ) -> None:
        """Go on from what an earlier server had as its `latest`, at logical time `now`."""
        for history in histories:
            assert history.path is not None
            self._histories[history.path] = history
            if history.is_predicted:
                self.model.count_on(history, now)
        self._topics.update(topics)

    def clear(self) -> None:
        self._histories.clear()
        self._topics.clear()
        self._expected.clear()
        self.model = ReuseModel()
