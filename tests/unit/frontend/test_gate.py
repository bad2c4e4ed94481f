from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from rag_radix_frontend import gate as module
from rag_radix_frontend.errors import RequestError
from rag_radix_frontend.gate import Gate
from unit.frontend.speculative_server import eventually, no_more_threads

pytestmark = pytest.mark.usefixtures("no_threads_left")


class Waiting:
    """A candidate that notes when it is let through."""

    def __init__(self, through: list[Waiting]) -> None:
        self._through = through

    def admitted(self) -> None:
        self._through.append(self)


def candidates(count: int) -> tuple[list[Waiting], list[Waiting]]:
    through: list[Waiting] = []
    return [Waiting(through) for _ in range(count)], through


def opened(room: Callable[[], int] = lambda: 4, limit: int = 64) -> Gate:
    gate = Gate(room, limit)
    (first,), through = candidates(1)
    assert not gate.enter(first)
    eventually(lambda: through == [first] and not gate._asking)
    gate.leave()
    return gate


def test_the_server_is_asked_before_anything_is_let_through() -> None:
    gate = opened()
    (second,), _ = candidates(1)
    assert gate.enter(second)


def test_while_open_the_server_is_not_asked() -> None:
    asked: list[int] = []
    gate = opened(lambda: asked.append(1) or 4)  # type: ignore[func-returns-value]
    some, _ = candidates(20)
    assert all(gate.enter(one) for one in some)
    assert len(asked) == 1


def test_no_more_than_the_limit_are_inside_and_the_next_enters_when_one_leaves() -> None:
    gate = opened(limit=2)
    some, through = candidates(5)
    assert [gate.enter(one) for one in some] == [True, True, False, False, False]
    gate.leave()
    assert through == [some[2]]
    gate.withdraw(some[3])
    gate.leave()
    assert through == [some[2], some[4]]


def test_what_waits_is_let_through_in_its_order_as_far_as_there_is_room() -> None:
    rooms = iter([3, 0, 2, 4])
    gate = Gate(lambda: next(rooms))
    some, through = candidates(7)
    with gate._changed:
        for one in some:
            gate.enter(one)
    eventually(lambda: len(through) == 7)
    assert through == some


def test_a_refusal_shuts_the_gate_until_the_server_has_room_again() -> None:
    rooms = [4]
    gate = opened(lambda: rooms[0])
    rooms[0] = 0
    gate.shut()
    (one,), through = candidates(1)
    assert not gate.enter(one)
    eventually(lambda: gate._interval_s > module._SHORTEST_INTERVAL_S)
    assert through == []
    rooms[0] = 1
    eventually(lambda: through == [one])


def test_one_thread_asks_for_all_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHORTEST_INTERVAL_S", 0.001)
    monkeypatch.setattr(module, "_LONGEST_INTERVAL_S", 0.008)
    intervals: list[float] = []
    askers: set[threading.Thread] = set()

    def ask() -> int:
        intervals.append(gate._interval_s)
        askers.add(threading.current_thread())
        return 0

    gate = Gate(ask)
    some, _ = candidates(50)
    for one in some:
        gate.enter(one)
    eventually(lambda: len(intervals) >= 7)
    for one in some:
        gate.withdraw(one)
    assert intervals[:7] == [0, 0.001, 0.002, 0.004, 0.008, 0.008, 0.008]
    assert len(askers) == 1


def test_nothing_is_asked_once_nobody_waits() -> None:
    asked: list[int] = []
    gate = Gate(lambda: asked.append(1) or 0)  # type: ignore[func-returns-value]
    (one,), _ = candidates(1)
    gate.enter(one)
    eventually(lambda: asked)
    gate.withdraw(one)
    eventually(lambda: not gate._asking)
    count = len(asked)
    threading.Event().wait(0.12)
    assert len(asked) == count


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_server_without_the_route_is_asked_once(status: int) -> None:
    asked: list[int] = []

    def ask() -> int:
        asked.append(1)
        raise RequestError("no route", status)

    gate = Gate(ask)
    some, through = candidates(3)
    gate.enter(some[0])
    eventually(lambda: gate._useless and not gate._asking)
    assert not gate.enter(some[1])
    assert (asked, through) == ([1], [])


@pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError(), KeyError("accepts")]
    + [RequestError("", status) for status in (None, 408, 429, 500, 503)],
)
def test_a_server_that_cannot_be_asked_is_asked_again(error: Exception) -> None:
    replies: Iterator[int | Exception] = iter([error, error, 2])

    def ask() -> int:
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    gate = Gate(ask)
    (one,), through = candidates(1)
    gate.enter(one)
    eventually(lambda: through == [one])


def test_a_thread_that_cannot_be_started_is_tried_again_when_the_next_one_waits() -> None:
    gate = Gate(lambda: 4)
    some, through = candidates(2)
    with no_more_threads():
        assert not gate.enter(some[0])
    assert not gate.enter(some[1])
    eventually(lambda: through == some)
