"""Failures end speculations, and reach the program as they do without them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import Document, RagEndpoint, rag_retrieve
from rag_radix_frontend.errors import RequestAborted, RequestError, RetrievalError
from unit.frontend.speculative_programs import (
    CATS,
    DOGS,
    GUESS,
    MOON,
    OTHER,
    SPECULATING,
    ask,
    report_of,
    sent,
)
from unit.frontend.speculative_server import WAIT_S, Scripted, SpeculativeServer, eventually

pytestmark = SPECULATING


class DatabaseDown(Exception):
    pass


def fail() -> None:
    raise DatabaseDown


@pytest.mark.parametrize("stream", [False, True])
def test_a_search_that_fails_ends_its_speculation_and_raises(
    server: SpeculativeServer, backend: RagEndpoint, stream: bool
) -> None:
    server.hold = lambda request: True
    state = ask(Scripted(GUESS, sent(server), fail, GUESS)).run(backend=backend, stream=stream)
    with pytest.raises(DatabaseDown):
        "".join(state.text_iter("answer"))
    eventually(lambda: server.requests[0].end == "Aborted")
    assert len(server.requests) == 1


@pytest.mark.parametrize("ending", [asyncio.CancelledError, SystemExit])
def test_a_search_that_ends_with_no_exception_proper_fails_the_program_too(
    backend: RagEndpoint, ending: type[BaseException]
) -> None:
    def end() -> None:
        raise ending

    state = ask(Scripted(end, GUESS)).run(backend=backend)
    with pytest.raises(RetrievalError, match=ending.__name__):
        state.text()


def test_a_template_that_fails_for_a_final_document_raises(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    def template(document: Document) -> str:
        return str(document.metadata["title"]) if document is MOON else document.text

    server.hold = lambda request: True
    state = ask(Scripted(GUESS, sent(server), OTHER), template=template).run(backend=backend)
    with pytest.raises(KeyError, match="title"):
        state["answer"]
    eventually(lambda: server.requests[0].end == "Aborted")


def test_a_template_that_fails_for_a_document_that_is_not_final_fails_nothing(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    def template(document: Document) -> str:
        return str(document.metadata["title"]) if document is MOON else document.text

    state = ask(Scripted(OTHER, GUESS, sent(server), GUESS), template=template).run(backend=backend)
    assert state["answer"] == "[31:'o? ']"
    report_of(state, started=1, kept=1)


@pytest.mark.parametrize("failing", ["template", "server"])
def test_an_order_that_cannot_be_had_for_documents_that_are_not_final_fails_nothing(
    server: SpeculativeServer,
    backend: RagEndpoint,
    failing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def template(document: Document) -> str:
        if failing == "template" and document is MOON:
            raise KeyError("title")
        return document.text

    def cached_order(text: str, documents: list[str], public: bool) -> list[int]:
        if failing == "server" and any("moon" in each for each in documents):
            raise RequestError("no order for these", 400)
        return [1, 0]

    monkeypatch.setattr(backend, "cached_order", cached_order)
    server.hold = lambda request: True

    def ended() -> None:
        eventually(lambda: server.requests[0].end == "Aborted")
        server.hold = lambda request: False

    first, wrong = (MOON, DOGS), (MOON, CATS)
    script = Scripted(first, GUESS, sent(server), wrong, ended, GUESS, sent(server, 2), GUESS)
    state = ask(script, template=template, order="cached_first").run(backend=backend)
    assert state["answer"] == "[31:'o? ']"
    assert state["docs"].ids == [DOGS.id, CATS.id]
    report_of(state, stages=5, started=2, cancelled=1, kept=1)


def test_an_error_in_what_follows_is_raised_in_the_program(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, lambda: time.sleep(0.02), GUESS), "q")
        s += sgl.user(sgl.user_begin())
        s += sgl.gen("answer")

    state = program.run(backend=backend)
    with pytest.raises(AssertionError, match="Nested roles"):
        state["answer"]
    assert server.requests == []


def test_a_request_that_cannot_be_made_is_raised_where_the_program_makes_it(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.image(b"one") + sgl.image(b"other")
        s += rag_retrieve(Scripted(GUESS, lambda: time.sleep(0.02), OTHER, GUESS), "q")
        s += sgl.gen("answer")

    state = program.run(backend=backend)
    with pytest.raises(AssertionError, match="one image"):
        state["answer"]
    assert server.requests == []
    assert backend.speculator.gate._inside == 0


def test_a_request_that_the_server_refuses_for_itself_is_raised_as_without_speculation(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.answer = lambda *_, **__: {"error": {"message": "too long"}}  # type: ignore[method-assign]
    failed = lambda: eventually(lambda: backend.retrievals().failed)  # noqa: E731
    state = ask(Scripted(GUESS, failed, GUESS)).run(backend=backend)
    with pytest.raises(Exception, match="too long"):
        state["answer"]
    assert [r.speculative for r in server.requests] == [True, False]
    report_of(state, failed=1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_speculation_that_the_server_aborts_by_itself_has_failed(
    server: SpeculativeServer, backend: RagEndpoint, stream: bool
) -> None:
    server.hold = lambda request: request.speculative

    def abort() -> None:
        sent(server)()
        server.requests[0].stop("Aborted by the operator")
        eventually(lambda: backend.retrievals().failed)

    state = ask(Scripted(GUESS, abort, GUESS)).run(backend=backend, stream=stream)
    assert "".join(state.text_iter("answer")) == "[35:'o? ']"
    report = report_of(state, failed=1)
    assert (report.started, report.cancelled) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_a_program_that_searches_ends_its_speculation(
    server: SpeculativeServer, backend: RagEndpoint, stream: bool
) -> None:
    server.hold = lambda request: True
    cancelled = threading.Event()
    script = Scripted(GUESS, sent(server), lambda: cancelled.wait(WAIT_S), OTHER, GUESS)
    state = ask(script).run(backend=backend, stream=stream)
    sent(server)()
    backend.cancel(state)
    assert server.requests[0].end == "Aborted"
    cancelled.set()
    with pytest.raises(RequestAborted, match="cancelled"):
        "".join(state.text_iter("answer"))
    assert len(server.requests) == 1
    report_of(state, cancelled=1)


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_a_program_whose_speculation_was_kept_ends_it(
    server: SpeculativeServer, backend: RagEndpoint, stream: bool
) -> None:
    server.hold = lambda request: True
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend, stream=stream)
    eventually(lambda: server.requests and server.requests[0].promoted)
    time.sleep(0.02)
    backend.cancel(state)
    with pytest.raises(RequestAborted):
        "".join(state.text_iter("answer"))
    assert len(server.requests) == 1


def test_a_kept_speculation_that_the_program_never_asks_for_is_ended(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: True
    cleared = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, lambda: cleared.wait(WAIT_S), GUESS), "q")
        s += "text" + sgl.gen("answer")
        sent(server)()
        # Nothing in a program can take back what it has appended.
        with s.stream_executor.queue.mutex:
            s.stream_executor.queue.queue.clear()
            s.stream_executor.queue.unfinished_tasks = 1
        cleared.set()

    program.run(backend=backend)
    eventually(lambda: server.requests and server.requests[0].end == "Aborted")
