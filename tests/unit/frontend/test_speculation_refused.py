"""Speculations that the server has no room for: sent when it has, unless they are outdated."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import RagEndpoint, pipeline, rag_retrieve
from rag_radix_frontend.gate import Gate
from rag_radix_frontend.retriever import ScoredDocument
from unit.frontend.speculative_programs import (
    CATS,
    GUESS,
    OTHER,
    SPECULATING,
    ask,
    report_of,
    sent,
    settled,
)
from unit.frontend.speculative_server import Scripted, SpeculativeServer, eventually

pytestmark = SPECULATING


@pytest.fixture
def opened(server: SpeculativeServer, backend: RagEndpoint) -> None:
    """The endpoint has found room at the server once, so it sends speculations unasked."""
    ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend).sync()
    eventually(lambda: settled(backend.retrievals()))
    server.requests.clear()
    server.pool_asked = 0


def filled(server: SpeculativeServer) -> None:
    server.waiting = server.max_prefill_bs


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_speculation_is_sent_when_the_pool_drains(
    server: SpeculativeServer, backend: RagEndpoint, stream: bool
) -> None:
    filled(server)

    def drain() -> None:
        sent(server)()
        eventually(lambda: server.pool_asked > 1)
        assert len(server.requests) == 1
        server.waiting = 0
        sent(server, 2)()

    state = ask(Scripted(GUESS, drain, GUESS)).run(backend=backend, stream=stream)
    assert "".join(state.text_iter("answer")) == "[35:'o? ']"
    assert [r.speculative for r in server.requests] == [True, True]
    assert settled(report_of(state, started=2, refused=1, kept=1))


@pytest.mark.usefixtures("opened")
@pytest.mark.filterwarnings("error:Both dtype and regex")
def test_what_is_sent_again_is_the_same_request(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    def drain() -> None:
        sent(server)()
        eventually(lambda: server.pool_asked > 1)
        server.waiting = 0
        sent(server, 2)()

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, drain, GUESS), "q") + sgl.gen("answer", dtype=int)

    filled(server)
    state = program.run(backend=backend)
    assert state["answer"] == "[24:'.\\n\\n']"
    first, second = (r.body["sampling_params"] for r in server.requests)
    assert first == second
    assert settled(report_of(state, started=2, refused=1, kept=1))


@pytest.mark.usefixtures("opened")
def test_a_refused_speculation_whose_documents_change_is_not_sent_again(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    filled(server)

    def drain() -> None:
        eventually(lambda: server.pool_asked > 1)
        server.waiting = 0
        sent(server, 2)()

    def refused() -> None:
        eventually(lambda: backend.retrievals().refused)

    state = ask(Scripted(OTHER, refused, GUESS, drain, GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    assert ["moon" in r.prompt for r in server.requests] == [True, False]
    report_of(state, started=2, refused=1, withheld=1, kept=1)


@pytest.mark.usefixtures("opened")
def test_while_the_server_refuses_nothing_more_is_sent_ahead(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    filled(server)
    stages = [OTHER if i % 2 else GUESS for i in range(20)]
    first = Scripted(GUESS, sent(server), lambda: eventually(lambda: server.pool_asked), *stages)
    ask(first).run(backend=backend).sync()
    states = [ask(Scripted(*stages)).run(backend=backend) for _ in range(10)]
    assert all(state["answer"] for state in states)
    assert len(server.speculations) == 1
    assert len(server.ordinary) == 11
    total = backend.retrievals()
    assert (total.refused, total.started) == (1, 2)
    assert total.withheld > 0


@pytest.mark.usefixtures("opened")
def test_a_speculation_that_the_server_ends_is_sent_again_when_it_has_room(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    def end() -> None:
        sent(server)()
        filled(server)
        server.requests[0].stop("speculation ended: others wait")
        eventually(lambda: server.pool_asked)
        server.hold = lambda request: False
        server.waiting = 0
        sent(server, 2)()

    server.hold = lambda request: True
    state = ask(Scripted(GUESS, end, GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    assert settled(report_of(state, started=2, ended=1, kept=1))


@pytest.mark.usefixtures("opened")
def test_a_pool_with_room_for_some_gets_no_more_than_those_at_once(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    filled(server)
    server.hold = lambda request: request.speculative
    done = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, done.wait, GUESS), "q") + sgl.gen("answer")

    states = [program.run(backend=backend) for _ in range(8)]
    eventually(lambda: server.pool_asked > 1)
    refused = len(server.speculations)
    full = server.pool()
    server.waiting = server.max_prefill_bs - 2
    replies = [server.pool()]  # and full again, before it is asked for the second time
    server.pool = lambda: replies.pop() if replies else full  # type: ignore[method-assign]
    eventually(lambda: len(server.speculations) == refused + 2)
    time.sleep(0.1)
    assert len(server.speculations) == refused + 2
    server.hold = lambda request: False
    for request in server.speculations:
        request.go.set()
    done.set()
    assert [s["answer"] for s in states] == ["[24:'.\\n\\n']"] * 8


def test_a_server_that_takes_none_at_all_answers_every_program(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    def pause() -> None:
        time.sleep(0.01)

    server.max_prefill_bs = 0
    program = ask(Scripted(GUESS, pause, OTHER, pause, GUESS))
    states = program.run_batch([{}] * 20, backend=backend)
    assert [s["answer"] for s in states] == ["[35:'o? ']"] * 20
    assert server.speculations == []


def test_a_server_without_the_routes_gets_no_speculations_and_is_asked_once(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.missing = ("/rag/promote", "/rag/pool")
    for _ in range(3):
        script = Scripted(GUESS, lambda: eventually(lambda: server.pool_asked), OTHER, GUESS)
        assert ask(script).run(backend=backend)["answer"] == "[35:'o? ']"
    assert [r.speculative for r in server.requests] == [False] * 3
    assert server.pool_asked == 1


def test_a_candidate_that_is_let_through_late_waits_no_more(monkeypatch: Any) -> None:
    monkeypatch.setattr(pipeline, "next_call", lambda *_: "call")
    started: list[str] = []
    gate = Gate(lambda: 0)
    speculator: Any = SimpleNamespace(
        gate=gate,
        start=lambda _executor, call, _log, _over: (
            started.append(call) or SimpleNamespace(discard=lambda: None)
        ),
    )
    executor: Any = SimpleNamespace(meta_info={})
    with pipeline.Pipeline(executor, "docs", str, speculator=speculator, total=None) as retrieval:
        retrieval.guess((ScoredDocument(CATS, 1.0),))
        assert list(gate._waiting) == [retrieval]
        retrieval.admitted()  # for the documents before these, say
        assert started == ["call"]
        assert not gate._waiting
        gate.leave()
