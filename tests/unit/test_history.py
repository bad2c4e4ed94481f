"""Decayed uses, and what is learned from them."""

from __future__ import annotations

import pytest

from rag_radix.history import HALF_LIVES, Kind, PathHistories, PathHistory, ReuseModel


def test_counts_decay_by_half_in_a_half_life():
    history = PathHistory()
    history.record(10)
    for index, half_life in enumerate(HALF_LIVES):
        assert history.counts_at(10 + int(half_life))[index] == pytest.approx(0.5)
    history.record(10 + int(HALF_LIVES[0]))
    assert history.counts[0] == pytest.approx(1.5)
    assert (history.uses, history.last_use) == (2, 160)


def test_documents_are_grouped_by_their_uses_and_apart_from_the_rest():
    history, groups = PathHistory(), []
    for now in range(1, 11):
        history.record(now)
        groups.append(history.group - Kind.DOCUMENT)
    assert groups == [0, 1, 2, 2, 3, 3, 3, 3, 4, 4]
    tail = PathHistory()
    tail.record(1, Kind.TAIL)
    tail.record(2, Kind.TAIL)
    assert tail.group == Kind.TAIL


def train(model, uses, until):
    """Let each path of `uses` (path -> times) be used at its times, up to `until`."""
    histories = {path: PathHistory() for path in uses}
    for now in range(1, until + 1):
        model.advance(now)
        for path, times in uses.items():
            if now in times:
                model.use(histories[path], now, Kind.DOCUMENT)
    return histories


def rate(model, history, now):
    counts = history.counts_at(now)
    return sum(a * b for a, b in zip(model.rates[history.group], counts, strict=True))


def test_rates_are_true_to_scale():
    model = ReuseModel()
    every_20 = {path: set(range(1 + path, 4_001, 20)) for path in range(20)}
    histories = train(model, every_20, 4_000)
    predicted = sum(rate(model, history, 4_000) for history in histories.values())
    assert predicted == pytest.approx(1.0, rel=0.1)  # one use a retrieval, and so it was


def test_what_never_comes_back_is_believed_less_and_less():
    model = ReuseModel()
    once = {path: {path} for path in range(1, 3_001)}
    histories = train(model, once, 3_000)
    first = ReuseModel().rates[histories[1].group]
    assert all(now < 0.1 * then for now, then in zip(model.rates[2], first, strict=True))


def test_bursts_are_believed_where_there_are_bursts():
    bursts = {path: {4 * path, 4 * path + 40} for path in range(1, 900)}
    spread = {path: {4 * path, 4 * path + 1_500} for path in range(1, 900)}
    short = []
    for uses in (bursts, spread):
        model = ReuseModel()
        train(model, uses, 3_600)
        rates = model.rates[Kind.DOCUMENT]  # of what was used once
        short.append(rates[0] / sum(rates))
    assert short[0] > short[1] + 0.1


def test_the_table_forgets_what_was_used_longest_ago_and_expects_nothing_of_it():
    histories = PathHistories(capacity=2)
    for now, path in enumerate([b"a", b"b", b"a", b"c"], 1):
        histories.model.advance(now)
        histories.record(path, now)
    assert len(histories) == 2
    assert histories.record(b"a", 4).uses == 3
    assert histories.record(b"b", 4).uses == 1
    assert histories.model._counts.sum() > 0
    histories.clear()
    assert len(histories) == 0
    assert histories.model._counts.sum() == 0


def test_counts_of_all_paths_are_the_sum_of_theirs():
    histories, kept = PathHistories(capacity=5), {}
    for now in range(1, 60):
        histories.model.advance(now)
        path = bytes([now * now % 7])
        kept[path] = histories.record(path, now)
    live = histories._histories.values()
    for index in range(len(HALF_LIVES)):
        expected = sum(history.counts_at(59)[index] for history in live)
        assert histories.model._counts[:, index].sum() == pytest.approx(expected)


def test_expected_uses_are_those_of_the_last_look_at_the_queue():
    histories = PathHistories()
    a, b = histories.record(b"a", 1), histories.record(b"b", 1)
    histories.expect([[b"a"], [b"a", b"unknown"], [], []])
    assert (a.expected, b.expected) == (0.5, 0)
    histories.expect([[b"b"]])
    assert (a.expected, b.expected) == (0, 1)
    histories.expect([])
    assert (a.expected, b.expected) == (0, 0)
    assert len(histories) == 2


def test_a_use_that_names_no_document_counts_once_however_many_nodes_share_it():
    histories = PathHistories()
    named = histories.record(b"a", 1)
    for _ in range(3):
        assert histories.record_unnamed(named, Kind.TAIL, 5) is named
    assert (named.uses, named.group) == (2, Kind.DOCUMENT + 1)
    own = histories.record_unnamed(None, Kind.PREFIX, 5)
    assert (own.uses, own.group) == (1, Kind.PREFIX)


def test_a_forgotten_history_that_a_node_still_holds_is_not_subtracted_twice():
    histories = PathHistories(capacity=2)
    histories.model.advance(1)
    held = histories.record(b"held", 1)
    for now, path in enumerate([b"a", b"b", b"c"], 2):
        histories.model.advance(now)
        histories.record(path, now)
    histories.record_unnamed(held, Kind.TAIL, 4)
    assert held.uses == 2
    live = [*histories._histories.values(), held]
    for index in range(len(HALF_LIVES)):
        expected = sum(history.counts_at(4)[index] for history in live)
        assert histories.model._counts[:, index].sum() == pytest.approx(expected)
    assert (histories.model._counts >= 0).all()
