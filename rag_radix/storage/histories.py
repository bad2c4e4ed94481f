"""What is remembered of paths and topics, as values that can be written down and read again.

Half a megabyte for each 5,000 paths; those that were used last, up to a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rag_radix.history import HALF_LIVES, PathHistories, PathHistory, ReuseModel, Topic

FORMAT_VERSION = 1
_CAPACITY = 1 << 14
_GROUPS = len(ReuseModel().rates)


def saved(histories: PathHistories) -> Callable[[], dict[str, Any]]:
    """What `restore` takes, in a form that another thread can finish."""
    paths, documents = histories.latest(_CAPACITY)
    learned = histories.model.learned()

    def collect() -> dict[str, Any]:
        topics = {
            id(topic): topic for topic in (*(p.topic for p in paths), *(t for _, t in documents))
        }
        numbers = {key: number for number, key in enumerate(topics)}
        return {
            "format": FORMAT_VERSION,
            "half_lives": HALF_LIVES,
            "learned": learned,
            "topics": [[topic.counts, topic.uses, topic.last_use] for topic in topics.values()],
            "paths": [_as_json(path, numbers[id(path.topic)]) for path in paths],
            "documents": [(name, numbers[id(topic)]) for name, topic in documents],
        }

    return collect


def _as_json(history: PathHistory, topic: int) -> list[Any]:
    assert history.path is not None
    return [
        history.path.hex(),
        topic,
        history.uses,
        history.last_use,
        history.count,
        history.group,
        history.is_predicted,
    ]


def restore(histories: PathHistories, fields: Mapping[str, Any], now: int) -> None:
    """Go on from what was `saved`, at logical time `now`.

    Raises:
        KeyError, IndexError, TypeError, ValueError: Something else was written, of which nothing is
            restored.
    """
    if fields["format"] != FORMAT_VERSION or tuple(fields["half_lives"]) != HALF_LIVES:
        raise ValueError("histories of another format")
    topics = [_topic(*each, now=now) for each in fields["topics"]]
    paths = [_path(topics, *each, now=now) for each in fields["paths"]]
    documents = [
        ((str(id), str(version), str(namespace)), topics[number])
        for (id, version, namespace), number in fields["documents"]
    ]
    histories.model.learn_from(fields["learned"], now)
    histories.restore(paths, documents, now)


def _topic(counts: Any, uses: Any, last_use: Any, *, now: int) -> Topic:
    topic = Topic()
    topic.counts = tuple(_positive(count) for count in counts)
    topic.uses, topic.last_use = int(_positive(uses)), min(int(_positive(last_use)), now)
    if len(topic.counts) != len(HALF_LIVES):
        raise ValueError("counts by other half-lives")
    return topic


def _path(
    topics: list[Topic],
    path: Any,
    topic: Any,
    uses: Any,
    last_use: Any,
    count: Any,
    group: Any,
    is_predicted: Any,
    *,
    now: int,
) -> PathHistory:
    history = PathHistory(topics[topic], bytes.fromhex(path))
    history.uses, history.last_use = int(_positive(uses)), min(int(_positive(last_use)), now)
    history.count, history.group = _positive(count), range(_GROUPS)[group]
    history.is_predicted = bool(is_predicted)
    # It was written while requests were counted.
    history.topic.uses = max(history.topic.uses, history.uses, 1)
    return history


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value!r:.40} is no count")
    return number
