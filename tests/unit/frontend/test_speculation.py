"""What is answered ahead of a retrieval, what is kept of it, and what is reported."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import RagEndpoint, rag_retrieve
from unit.frontend.speculative_programs import (
    CATS,
    DOGS,
    GUESS,
    OTHER,
    SPECULATING,
    ask,
    report_of,
    sent,
    settled,
)
from unit.frontend.speculative_server import WAIT_S, Scripted, SpeculativeServer, eventually

pytestmark = SPECULATING


def test_a_speculation_for_the_final_documents_is_the_answer(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    assert state["docs"].ids == ["animals/cats", "animals/dogs"]
    (request,) = server.requests
    assert request.speculative
    eventually(lambda: request.promoted)
    assert server.promotions == [request.rids]
    report = report_of(state, kept=1)
    assert (report.retrievals, report.stages, report.started) == (1, 2, 1)
    assert report.search_not_overlapped_s < report.search_s
    assert settled(report)


def test_a_speculation_whose_documents_change_is_ended_and_the_next_begins(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: "moon" in request.prompt
    state = ask(Scripted(OTHER, sent(server), GUESS, sent(server, 2), GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    wrong, right = server.requests
    eventually(lambda: wrong.end == "Aborted")
    assert wrong.rids[0] in server.aborted
    assert right.rids[0] not in server.aborted
    report = report_of(state, started=2, cancelled=1, kept=1, wasted_tokens=31 - 2 + 1)
    assert settled(report)


def test_a_wrong_guess_is_ended_and_the_request_sent_as_an_ordinary_one(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: request.speculative
    state = ask(Scripted(OTHER, sent(server), GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    guess, request = server.requests
    assert guess.speculative
    assert "speculative" not in request.body["sampling_params"]["custom_params"]["rag"]
    assert request.prompt.startswith("Read. Cats purr.")
    report = report_of(state, cancelled=1, kept=0)
    assert report.search_not_overlapped_s == report.search_s


def test_the_same_documents_again_change_nothing(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    state = ask(Scripted(GUESS, sent(server), GUESS, GUESS, GUESS)).run(backend=backend)
    state.sync()
    assert len(server.requests) == 1
    assert report_of(state, kept=1).stages == 4


def test_the_order_of_the_documents_counts(server: SpeculativeServer, backend: RagEndpoint) -> None:
    state = ask(Scripted((DOGS, CATS), sent(server), GUESS)).run(backend=backend)
    assert state["answer"]
    report_of(state, cancelled=1)


def test_a_retriever_with_one_stage_sends_nothing_ahead(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    state = ask(Scripted(GUESS)).run(backend=backend)
    assert state["answer"]
    assert (server.speculations, server.pool_asked, server.promotions) == ([], 0, [])
    report = report_of(state, stages=1, started=0)
    assert report.search_not_overlapped_s == report.search_s > 0


def test_speculation_can_be_switched_off_for_a_call(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    state = ask(Scripted(GUESS, OTHER, GUESS), speculative=False).run(backend=backend)
    assert state["answer"]
    assert (server.speculations, server.pool_asked) == ([], 0)
    assert report_of(state).stages == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_continues_from_what_is_already_there(
    server: SpeculativeServer, backend: RagEndpoint, asynchronous: bool
) -> None:
    server.hold = lambda request: True
    server.hold_after = 4
    buffered = threading.Event()

    def until_buffered() -> None:
        sent(server)()
        time.sleep(0.05)
        buffered.set()

    program = ask(Scripted(GUESS, until_buffered, GUESS))
    state = program.run(backend=backend, stream=True)
    pieces: list[str] = []

    def read() -> None:
        async def read_async() -> None:
            async for piece in state.text_async_iter("answer"):
                pieces.append(piece)

        if asynchronous:
            asyncio.run(read_async())
        else:
            pieces.extend(state.text_iter("answer"))

    reader = threading.Thread(target=read)
    reader.start()
    eventually(lambda: "".join(pieces) == "[35:")
    server.requests[0].go.set()
    reader.join(WAIT_S)
    assert "".join(pieces) == "[35:'o? ']"
    assert len(server.requests) == 1
    report_of(state, kept=1)


def test_forks_speculate_each_for_itself(server: SpeculativeServer, backend: RagEndpoint) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Start. "
        forks = s.fork(2)
        scripts = [Scripted(d, sent(server, 2), d) for d in (GUESS, OTHER)]
        forks += lambda i: rag_retrieve(scripts[i], "q") + sgl.gen("answer")
        forks.join()
        s += sgl.gen("end")

    state = program.run(backend=backend)
    assert state["answer"] == ["[31:'.\\n\\n']", "[27:'.\\n\\n']"]
    assert len(server.speculations) == 2
    eventually(lambda: backend.retrievals().kept == 2)


def test_a_batch_speculates_for_each_program(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    @sgl.function
    def program(s: Any, i: int) -> None:
        def arrived() -> None:
            prompt = f"Cats purr.\n\nDogs bark.\n\n#{i}#"
            eventually(lambda: any(r.prompt == prompt for r in server.speculations))

        s += rag_retrieve(Scripted(OTHER, GUESS, arrived, GUESS), "q") + f"#{i}#"
        s += sgl.gen("answer")

    states = program.run_batch([{"i": i} for i in range(20)], backend=backend)
    assert [s["answer"] for s in states] == [
        f"[{24 + len(f'#{i}#')}:{f'#{i}#'[-3:]!r}]" for i in range(20)
    ]
    assert server.ordinary == []
    eventually(lambda: settled(backend.retrievals()))
    total = backend.retrievals()
    assert (total.retrievals, total.stages, total.kept) == (20, 60, 20)
    assert sum(s.get_meta_info("docs").started for s in states) == total.started


def test_without_a_thread_what_is_in_the_same_expression_is_sent_ahead(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, sent(server), GUESS), "q") + sgl.gen("answer")
        s += rag_retrieve(Scripted(GUESS, GUESS), "q", name="more")
        s += sgl.gen("end")

    state = program.run(backend=backend, use_thread=False)
    assert state["answer"] == "[24:'.\\n\\n']"
    assert [r.speculative for r in server.requests] == [True, False]


@pytest.mark.parametrize("are_the_programs", [False, True])
def test_stop_strings_do_not_grow(
    server: SpeculativeServer, backend: RagEndpoint, are_the_programs: bool
) -> None:
    stop = {"stop": ["x"]}
    gen = sgl.gen("answer", **({} if are_the_programs else stop))

    @sgl.function
    def program(s: Any) -> None:
        for i in range(3):
            s += rag_retrieve(Scripted(GUESS, sent(server, i + 1), GUESS), "q") + gen

    program.run(backend=backend, **(stop if are_the_programs else {})).sync()
    assert stop == {"stop": ["x"]}
    assert [r.body["sampling_params"]["stop"] for r in server.requests] == [["x", "<|im_end|>"]] * 3
    assert [r.speculative for r in server.requests] == [True] * 3


def test_other_backends_report_the_search(stub: Any) -> None:
    state = ask(Scripted(OTHER, GUESS)).run(
        backend=sgl.RuntimeEndpoint(stub.url, chat_template_name="chatml")
    )
    report = report_of(state, stages=2, started=0)
    assert report.search_s == report.search_not_overlapped_s > 0
