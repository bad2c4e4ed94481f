"""Calls go out, replies come back to whoever asked, and an action that fails ends nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import io_struct
from sglang.utils import TypeBasedDispatcher

from rag_radix import rpc
from rag_radix.errors import RagRadixError, RpcError

rpc.register_types()


def scheduler(**actions: rpc.Action) -> Any:
    served = SimpleNamespace(_request_dispatcher=TypeBasedDispatcher([]), seen=[])
    rpc.serve(served, actions)
    return served


class Wire:
    """In place of SGLang's `TokenizerManager` and its sockets: bytes to schedulers and back."""

    def __init__(self, *schedulers: Any) -> None:
        self._schedulers = schedulers
        self._result_dispatcher = TypeBasedDispatcher([])
        self.held: list[bytes] | None = None

    def auto_create_handle_loop(self) -> None:
        pass

    def _dispatch_to_scheduler(self, call: Any) -> None:
        sent = io_struct.msgpack_encode(call)
        for one in self._schedulers:
            reply = one._request_dispatcher(io_struct.msgpack_decode(sent))
            self.deliver(io_struct.msgpack_encode(reply))

    def deliver(self, reply: bytes) -> None:
        if self.held is None:
            self._result_dispatcher(io_struct.msgpack_decode(reply))
        else:
            self.held.append(reply)

    def release(self, *, newest_first: bool = False) -> None:
        held, self.held = self.held or [], None
        for reply in reversed(held) if newest_first else held:
            self.deliver(reply)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    parallel = SimpleNamespace(num_dp_ranks=1)
    monkeypatch.setattr(rpc, "get_parallel", lambda: parallel)
    return parallel


def call(wire: Wire, action: str, body: Any = None) -> list[Any]:
    return asyncio.run(rpc.Caller(wire).call(action, body))


def test_an_action_gets_the_scheduler_and_the_body_and_its_result_comes_back() -> None:
    served = scheduler(echo=lambda who, body: [who is served, body])
    assert call(Wire(served), "echo", {"a": [1, None, "ü"]}) == [[True, {"a": [1, None, "ü"]}]]


def test_every_data_parallel_rank_answers(ranks: Any) -> None:
    ranks.num_dp_ranks = 2
    one, two = scheduler(name=lambda *_: "one"), scheduler(name=lambda *_: "two")
    assert call(Wire(one, two), "name") == ["one", "two"]


def failing(_scheduler: Any, kind: str) -> Any:
    if kind == "bug":
        raise KeyError("missing")
    if kind == "ours":
        raise RagRadixError("no such document: name one that is cached")
    return object()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bug", "KeyError: 'missing'"),
        ("ours", "^no such document: name one that is cached$"),
        ("not JSON", "not JSON serializable"),
    ],
)
def test_a_failure_is_raised_where_it_was_asked_for_and_logged(
    body: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = scheduler(failing=failing, fine=lambda *_: 1)
    with pytest.raises(RpcError, match=message):
        call(Wire(served), "failing", body)
    assert "The action failing failed" in caplog.text
    assert call(Wire(served), "fine") == [1]


def test_an_unknown_action_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(RpcError, match="no action 'pop', only pin, warm"):
        call(Wire(scheduler(warm=failing, pin=failing)), "pop")


def test_what_fails_on_one_rank_fails(ranks: Any) -> None:
    ranks.num_dp_ranks = 2
    one, two = scheduler(both=lambda *_: 1), scheduler(both=lambda *_: 1 / 0)
    with pytest.raises(RpcError, match="division by zero"):
        call(Wire(one, two), "both")


def test_replies_find_their_callers_in_any_order_and_none_waits_for_one_that_gave_up() -> None:
    async def ask() -> list[Any]:
        wire = Wire(scheduler(echo=lambda _, body: body))
        caller = rpc.Caller(wire)
        wire.held = []
        tasks = [asyncio.create_task(caller.call("echo", number)) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        wire.release(newest_first=True)
        assert await caller.call("echo", 3) == [3]
        answers = [await tasks[0], await tasks[2]]
        assert not caller._pending
        return answers

    assert asyncio.run(ask()) == [[0], [2]]
