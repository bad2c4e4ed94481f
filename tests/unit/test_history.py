"""Decayed uses of topics, the shares of their paths, and what is learned from them."""

from __future__ import annotations

import pytest

from rag_radix.history import HALF_LIVES, Kind, PathHistories, PathHistory, ReuseModel, Topic


def request(histories, now, names):
    """A request for documents by their names: each path's history."""
    histories.model.advance(now)
    paths = [names[: end + 1].encode() for end in range(len(names))]
    topic = histories.use_topic(names, paths[0], now)
    return [histories.record(path, topic, now, is_first=path is paths[0]) for path in paths]


def test_counts_decay_by_half_in_a_half_life():
    topic = Topic()
    topic.record(10)
    for index, half_life in enumerate(HALF_LIVES):
        assert topic.counts_at(10 + int(half_life))[index] == pytest.approx(0.5)
    topic.record(10 + int(HALF_LIVES[0]))
    assert topic.counts[0] == pytest.approx(1.5)
    assert (topic.uses, topic.last_use) == (2, 110)


def test_documents_in_another_order_or_choice_are_the_same_topic():
    histories = PathHistories()
    (a, ab), (c, cb), (b, bd) = (
        request(histories, 1 + i, n) for i, n in enumerate(("ab", "cb", "bd"))
    )
    assert {each.topic for each in (a, ab, c, cb, b, bd)} == {a.topic}
    assert a.topic.uses == 3
    assert a.share == pytest.approx(1 / 3)
    (other,) = request(histories, 4, "x")
    assert other.topic is not a.topic


def test_a_known_first_document_says_more_than_those_behind_it():
    histories = PathHistories()
    (a, _), (x, _) = request(histories, 1, "ab"), request(histories, 2, "xy")
    (_, ay) = request(histories, 3, "ay")
    assert ay.topic is a.topic is not x.topic
    # `y` was last retrieved for the topic of `a`.
    assert request(histories, 4, "zy")[0].topic is a.topic


def test_paths_are_grouped_by_uses_of_their_topic_and_shares_of_these():
    histories = PathHistories()
    new, below = request(histories, 1, "ab")
    assert new.group not in range(Kind.DOCUMENT + 12)
    groups = [below.group]
    for now in range(2, 8):
        (_, path) = request(histories, now, "ab")
        groups.append(path.group)
    for now in range(8, 32):
        request(histories, now, "ac")
    groups += [request(histories, 32, "ab")[1].group, request(histories, 33, "ad")[1].group]
    assert [group - Kind.DOCUMENT for group in groups] == [2, 5, 8, 8, 8, 11, 11, 10, 0]


def test_a_use_of_the_topic_raises_all_of_its_paths_and_no_other():
    histories = PathHistories()
    (a, ab), (x, _) = request(histories, 1, "ab"), request(histories, 2, "xy")

    def rates():
        return [histories.model.rate(each, 10 - each.topic.last_use) for each in (a, ab, x)]

    before = rates()
    request(histories, 3, "cb")
    after = rates()
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert after[2] == before[2]


def train(model, uses, until):
    """Let each path of `uses` (path -> times) be used at its times, up to `until`."""
    histories = {path: PathHistory(Topic()) for path in uses}
    for now in range(1, until + 1):
        model.advance(now)
        for path, times in uses.items():
            if now in times:
                model.use_topic(histories[path].topic, now)
                model.use(histories[path], now, Kind.DOCUMENT)
    return histories


def test_rates_are_true_to_scale():
    model = ReuseModel()
    every_20 = {path: set(range(1 + path, 4_001, 20)) for path in range(20)}
    histories = train(model, every_20, 4_000)
    predicted = sum(
        model.rate(history, 4_000 - history.topic.last_use) for history in histories.values()
    )
    assert predicted == pytest.approx(1.0, rel=0.1)  # one use a retrieval, and so it was


def test_what_never_comes_back_is_believed_less_and_less():
    model = ReuseModel()
    once = {path: {path} for path in range(1, 3_001)}
    histories = train(model, once, 3_000)
    group = histories[1].group
    first = ReuseModel().rates[group]
    assert all(now < 0.1 * then for now, then in zip(model.rates[group], first, strict=True))


def test_bursts_are_believed_where_there_are_bursts():
    bursts = {path: {4 * path, 4 * path + 40} for path in range(1, 900)}
    spread = {path: {4 * path, 4 * path + 1_500} for path in range(1, 900)}
    short = []
    for uses in (bursts, spread):
        model = ReuseModel()
        train(model, uses, 3_600)
        once = PathHistory(Topic())
        once.topic.record(1)
        once.record(Kind.DOCUMENT)
        rates = model.rates[once.group]
        short.append(rates[0] / sum(rates))
    assert short[0] > short[1] + 0.1


def test_the_table_forgets_what_was_used_longest_ago_and_expects_nothing_of_it():
    histories = PathHistories(capacity=2)
    for now, name in enumerate("abac", 1):
        request(histories, now, name)
    assert len(histories) == 2
    assert request(histories, 5, "a")[0].uses == 3
    assert request(histories, 6, "b")[0].uses == 1
    assert sum(map(sum, histories.model._counts)) > 0
    histories.clear()
    assert len(histories) == 0
    assert sum(map(sum, histories.model._counts)) == 0


def test_a_path_that_comes_under_another_topic_begins_anew():
    histories = PathHistories()
    first = histories.record(b"p", used_topic(histories, 1), 1)
    again = histories.record(b"p", used_topic(histories, 2), 2)
    assert again is not first
    assert (again.uses, len(histories)) == (1, 1)
    assert not first.is_predicted


def used_topic(histories, now):
    topic = Topic()
    histories.model.use_topic(topic, now)
    return topic


def assert_counts_are_those_of(histories, live, now):
    for index in range(len(HALF_LIVES)):
        expected = sum(each.share * each.topic.counts_at(now)[index] for each in live)
        assert sum(row[index] for row in histories.model._counts) == pytest.approx(expected)


def test_counts_of_all_paths_are_the_sum_of_theirs():
    histories = PathHistories(capacity=9)
    for now in range(1, 60):
        request(histories, now, "abcde"[now * now % 5] + "fgh"[now % 3])
    assert_counts_are_those_of(histories, histories._histories.values(), 59)


def test_expected_uses_are_those_of_the_last_look_at_the_queue():
    histories = PathHistories()
    ((a,), (b,)) = request(histories, 1, "a"), request(histories, 1, "b")
    histories.expect([[b"a"], [b"a", b"unknown"], [], []])
    assert (a.expected, b.expected) == (0.5, 0)
    histories.expect([[b"b"]])
    assert (a.expected, b.expected) == (0, 1)
    histories.expect([])
    assert (a.expected, b.expected) == (0, 0)
    assert len(histories) == 2


def test_a_use_that_names_no_document_counts_once_however_many_nodes_share_it():
    histories = PathHistories()
    (named,) = request(histories, 1, "a")
    for _ in range(3):
        assert histories.record_unnamed(named, Kind.TAIL, 5) is named
    assert (named.uses, named.topic.uses) == (2, 2)
    assert named.group >= Kind.DOCUMENT
    own = histories.record_unnamed(None, Kind.PREFIX, 5)
    assert (own.uses, own.group) == (1, Kind.PREFIX)


def test_a_forgotten_history_that_a_node_still_holds_is_not_subtracted_twice():
    histories = PathHistories(capacity=2)
    (held,) = request(histories, 1, "h")
    for now, name in enumerate("abc", 2):
        request(histories, now, name)
    histories.record_unnamed(held, Kind.TAIL, 4)
    assert held.uses == 2
    assert_counts_are_those_of(histories, [*histories._histories.values(), held], 4)
    assert min(map(min, histories.model._counts)) >= -1e-12
