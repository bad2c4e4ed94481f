"""A restart doesn't forget how often paths and topics were used."""

from __future__ import annotations

import orjson
import pytest
from unit.storage.stores import server
from unit.storage.test_preloading import again, preloaded
from unit.tree.prompts import prompt

from rag_radix.history import PathHistories
from rag_radix.policies.base import TierName
from rag_radix.storage import histories as histories_module
from rag_radix.storage.histories import restore, saved


def request(histories, now, names):
    histories.model.advance(now)
    topic = histories.use_topic([(name, "", "") for name in names], names[:1].encode(), now)
    paths = [names[: end + 1].encode() for end in range(len(names))]
    return [histories.record(path, topic, now, is_first=path is paths[0]) for path in paths]


def used(requests=700):
    """Histories with evidence that has been published."""
    histories = PathHistories()
    for now in range(1, requests):
        request(histories, now, ("ab", "ab", "cd", "xa", f"{chr(500 + now)}b")[now % 5])
    return histories


def through_file(histories, now):
    again = PathHistories()
    restore(again, orjson.loads(orjson.dumps(saved(histories)())), now)
    return again


def test_what_comes_back_goes_on_as_if_nothing_had_been():
    old = used()
    new = through_file(old, 699)
    assert len(new) == len(old)
    old.model._publish(699)  # as is done at a start
    for now, names in enumerate(("ab", "ac", "cd", "zb", "ab") * 40, 700):
        rates = []
        for each in (old, new):
            rates.append([each.model.rate(h, 0) for h in request(each, now, names)])
        assert rates[0] == pytest.approx(rates[1])


def test_only_the_latest_are_written(monkeypatch):
    monkeypatch.setattr(histories_module, "_CAPACITY", 20)
    old = used()
    fields = saved(old)()
    assert (len(fields["paths"]), len(fields["documents"])) == (20, 20)
    new = through_file(old, 699)
    assert new.get(b"ab").uses == old.get(b"ab").uses
    assert list(new._histories)[-3:] == list(old._histories)[-3:]


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 2},
        {"half_lives": [1.0]},
        {"learned": [[[1.0]]]},
        {"learned": [[[float("nan")] * 3] * 18] * 2},
        {"paths": [["zz", 0, 1, 1, 1.0, 2, True]]},
        {"paths": [["aa", 10**6, 1, 1, 1.0, 2, True]]},
        {"paths": [["aa", 0, -1, 1, 1.0, 2, True]]},
        {"paths": [["aa", 0, 1, 1, 1.0, 10**6, True]]},
        {"topics": None},
        {"topics": [[[1.0], 1, 1]]},
        {"documents": [[["a", ""], 0]]},
    ],
)
def test_what_cannot_be_understood_changes_nothing(damage):
    new = PathHistories()
    with pytest.raises((KeyError, IndexError, TypeError, ValueError)):
        restore(new, saved(used(60))() | damage, 59)
    assert len(new) == 0
    assert new.model.rates == PathHistories().model.rates


def test_a_server_goes_on_with_the_histories_of_the_one_before(tmp_path):
    with server(tmp_path, policy="pgdsf-plus") as first:
        for question in range(6):
            first.ask(prompt("a", "b", question=question))
            first.ask(prompt("c", question=question), cache_salt="secret")
        first.stop()
    (path,) = tmp_path.glob("*/statistics.json")
    assert b"secret" not in path.read_bytes()
    with again(tmp_path, policy="pgdsf-plus") as second:
        preloaded(second)
        node = second.h.ends()["b"]
        assert (node.statistics.history.uses, len(second.tree.histories)) == (6, 3)
        assert node.ranks[TierName.HOST].priority > 0
        second.ask(prompt("b", "a", question=7))  # the topic of the two, in another order
        assert second.h.ends()["b"].statistics.history.topic.uses == 7
        second.ask(prompt("c", question=8), cache_salt="secret")
        assert second.h.ends()["c"].statistics.history.uses == 7


def test_another_policy_needs_none_and_a_damaged_part_costs_only_itself(tmp_path, caplog):
    with server(tmp_path, policy="pgdsf-plus") as first:
        first.ask(prompt("a"))
        first.tree.histories.model._attributed[0][0] = -1.0
        first.stop()
    with server(tmp_path, policy="pgdsf") as second:
        assert len(second.tree.histories) == 0
        assert len(second.tree.storing.marks) == 2
    with server(tmp_path, policy="pgdsf-plus") as third:
        assert "histories of paths can't be understood" in caplog.text
        assert len(third.tree.histories) == 0
        assert len(third.tree.storing.marks) == 2
