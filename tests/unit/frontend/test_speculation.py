"""Speculation in programs: what is sent ahead, what is kept of it, and what never changes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import Document, RagEndpoint, RetrievalReport, rag_retrieve
from rag_radix_frontend.errors import RequestAborted
from sglang.lang.global_config import global_config
from unit.frontend.conftest import CATS, DOGS, MOON
from unit.frontend.speculative_server import (
    WAIT_S,
    Request,
    Scripted,
    SpeculativeServer,
    eventually,
)

pytestmark = pytest.mark.filterwarnings("ignore:Error in stream_executor")

GUESS, OTHER = (CATS, DOGS), (MOON,)


@pytest.fixture
def server() -> Iterator[SpeculativeServer]:
    server = SpeculativeServer()
    yield server
    server.close()


@pytest.fixture
def backend(server: SpeculativeServer) -> RagEndpoint:
    return RagEndpoint(server.url, chat_template_name="chatml")


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    eventually(
        lambda: (
            not [
                t
                for t in set(threading.enumerate()) - before
                if t.name.startswith("rag-") and "process_request" not in t.name
            ]
        ),
        "a thread is left",
    )


def sent(server: SpeculativeServer, count: int = 1) -> Callable[[], None]:
    """A step of a script: wait until so many speculations have arrived."""
    return lambda: eventually(
        lambda: len(server.speculations) >= count, f"{count} speculations never arrived"
    )


def ask(retriever: Any, **arguments: Any) -> Any:
    @sgl.function
    def program(s: Any) -> None:
        s += "Read. " + rag_retrieve(retriever, "q", **arguments)
        s += "Who? "
        s += sgl.gen("answer", temperature=0)

    return program


def report_of(state: Any, **expected: int) -> RetrievalReport:
    """The report of a retrieval once it says what is expected, which it must come to."""
    eventually(
        lambda: all(getattr(state.get_meta_info("docs"), k) == v for k, v in expected.items()),
        f"expected {expected}, got {state.get_meta_info('docs')}",
    )
    report = state.get_meta_info("docs")
    assert isinstance(report, RetrievalReport)
    return report


def assert_settled(report: RetrievalReport) -> None:
    fates = report.refused + report.ended + report.failed + report.cancelled + report.kept
    assert report.started == fates


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
    assert_settled(report)


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
    assert_settled(report)


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


def in_a_sum(s: Any, retrieve: Any) -> None:
    s += "a" + retrieve() + "b" + sgl.gen("answer") + "c"
    s += "d" + sgl.gen("more")


def in_roles(s: Any, retrieve: Any) -> None:
    s += sgl.user("Look: " + retrieve() + "Who?")
    s += sgl.assistant("It is " + sgl.gen("answer"))


def in_role_blocks(s: Any, retrieve: Any) -> None:
    with s.user():
        s += retrieve()
        s += "Who?"
    with s.assistant():
        s += sgl.gen("answer", stop="x")


def after_other_messages(s: Any, retrieve: Any) -> None:
    s += sgl.system("Be brief.")
    s += sgl.user("Hello") + sgl.assistant(sgl.gen("hello"))
    s += sgl.user(retrieve())
    s += sgl.assistant(sgl.gen("answer", stop=["x", "y"]))


def in_a_scope(s: Any, retrieve: Any) -> None:
    with s.var_scope("whole"):
        s += "a" + retrieve()
        with s.var_scope("inner"):
            s += "b"
    s += sgl.gen("answer")


def in_nested_lists(s: Any, retrieve: Any) -> None:
    s += sgl.user("x" + (retrieve() + ("y" + sgl.gen("answer"))))


def with_options(s: Any, retrieve: Any) -> None:
    s += retrieve() + sgl.gen("answer", regex="[0-9]+", max_tokens=3, top_p=0.5, stop=["\n"])


def of_a_type(s: Any, retrieve: Any) -> None:
    s += retrieve() + sgl.gen("answer", dtype=int)


def with_logprobs(s: Any, retrieve: Any) -> None:
    s += retrieve() + sgl.gen("answer", return_logprob=True, top_logprobs_num=2)


def with_a_choice(s: Any, retrieve: Any) -> None:
    s += retrieve() + "They are " + sgl.select("answer", ["pets", "stars"]) + sgl.gen("more")


def with_an_unconditional_choice(s: Any, retrieve: Any) -> None:
    s += retrieve() + sgl.select(
        "answer", ["pets", "stars"], choices_method=sgl.unconditional_likelihood_normalized
    )


PROGRAMS = [
    in_a_sum,
    in_roles,
    in_role_blocks,
    after_other_messages,
    in_a_scope,
    in_nested_lists,
    with_options,
    of_a_type,
    with_logprobs,
    with_a_choice,
    with_an_unconditional_choice,
]


def asked(requests: list[Request]) -> list[dict[str, Any]]:
    """Requests without what tells speculations from others."""
    return [
        {
            **{k: v for k, v in r.body.items() if k not in ("rid", "sampling_params")},
            "sampling_params": _plain(r.body["sampling_params"]),
        }
        for r in requests
    ]


def _plain(params: Any) -> Any:
    if isinstance(params, list):
        return [_plain(one) for one in params]
    rag = dict(params.get("custom_params", {}).get("rag", {}))
    rag.pop("speculative", None)
    plain = {k: v for k, v in params.items() if k != "custom_params"}
    return plain | ({"rag": rag} if rag.get("documents") else {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_with_and_without_speculation_the_same_is_asked_and_answered(
    server: SpeculativeServer, backend: RagEndpoint, program: Any, stream: bool
) -> None:
    function = sgl.function(program)

    def run(speculative: bool) -> tuple[Any, list[dict[str, Any]]]:
        server.requests.clear()
        arrived = sent(server) if speculative else lambda: None

        def retrieve() -> Any:
            # What follows must be there when the search ends, as it is with any real search.
            script = Scripted(GUESS, arrived, GUESS)
            return rag_retrieve(script, "q", speculative=speculative)

        state = function.run(retrieve=retrieve, backend=backend, temperature=0, stream=stream)
        text = state.text()
        variables = {k: v for k, v in state.stream_executor.variables.items() if k != "retrieve"}
        return (text, variables, state.messages()), asked(server.requests)

    plain, speculative = run(False), run(True)
    assert server.speculations
    assert speculative == plain
    assert backend.retrievals().kept == 1
    assert backend.retrievals().cancelled == 0


@pytest.mark.parametrize(
    "between",
    [
        lambda s: s.__iadd__(rag_retrieve(Scripted(OTHER), "q", name="more")),
        lambda s: s["docs"],
        lambda s: s.fork(2),
        lambda s: s.__iadd__(sgl.gen("two", n=2)),
        lambda s: s.__iadd__(sgl.image(b"a picture")),
    ],
    ids=["retrieval", "value read", "fork", "two samples", "image"],
)
def test_nothing_is_sent_ahead_beyond_what_only_the_program_can_do(
    server: SpeculativeServer, backend: RagEndpoint, between: Any
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, lambda: time.sleep(0.05), GUESS), "q")
        between(s)
        s += sgl.gen("answer")

    program.run(backend=backend).sync()
    assert server.speculations == []
    assert backend.retrievals().started == 0


def test_a_program_that_has_not_come_to_its_request_yet_is_tried_again_when_it_has(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    searching = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, searching.set, sent(server), GUESS), "q")
        assert searching.wait(WAIT_S)
        s += "Who? "
        s += sgl.gen("answer")

    state = program.run(backend=backend)
    assert state["answer"] == "[29:'o? ']"
    assert len(server.requests) == 1
    report_of(state, kept=1)


def test_a_race_of_appending_and_searching_never_changes_the_answer(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    @sgl.function
    def program(s: Any, delay_s: float) -> None:
        script = [step for i in range(6) for step in (OTHER if i % 2 else GUESS, pause)]
        s += rag_retrieve(Scripted(*script, GUESS), "q")
        time.sleep(delay_s)
        s += "Who? "
        time.sleep(delay_s)
        s += sgl.gen("answer")

    def pause() -> None:
        time.sleep(0.001)

    for i in range(60):
        state = program.run(delay_s=i % 10 * 0.0003, backend=backend)
        assert state["answer"] == "[29:'o? ']"
    eventually(lambda: not server.of("") and settled(backend))


def settled(backend: RagEndpoint) -> bool:
    r = backend.retrievals()
    return r.started == r.refused + r.ended + r.failed + r.cancelled + r.kept


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


def test_tokens_are_handed_out_only_when_the_server_has_made_it_an_ordinary_request(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: True
    server.hold_after = 4
    server.promoting.clear()
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend, stream=True)
    eventually(lambda: server.promotions)
    time.sleep(0.05)
    assert state.stream_executor.variables.get("answer", "") == ""
    server.promoting.set()
    eventually(lambda: state.stream_executor.variables.get("answer") == "[35:")
    server.requests[0].go.set()
    assert "".join(state.text_iter("answer")) == "[35:'o? ']"


def test_a_complete_answer_needs_no_reply(server: SpeculativeServer, backend: RagEndpoint) -> None:
    server.promoting.clear()
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    assert len(server.requests) == 1
    server.promoting.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_speculation_that_the_server_has_ended_is_asked_again(
    server: SpeculativeServer, backend: RagEndpoint, stream: bool
) -> None:
    server.hold = lambda request: request.speculative
    server.promoting.clear()
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend, stream=stream)
    eventually(lambda: server.promotions)
    server.requests[0].stop("speculation ended: others wait")
    server.promoting.set()
    assert "".join(state.text_iter("answer")) == "[35:'o? ']"
    assert [r.speculative for r in server.requests] == [True, False]
    report = report_of(state, ended=1, kept=0)
    assert report.search_not_overlapped_s == report.search_s


@pytest.mark.parametrize("stream", [False, True])
def test_a_speculation_that_the_server_does_not_know_is_dropped(
    server: SpeculativeServer, backend: RagEndpoint, stream: bool
) -> None:
    server.hold = lambda request: request.speculative
    server.promote = lambda request: "unknown"
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend, stream=stream)
    assert "".join(state.text_iter("answer")) == "[35:'o? ']"
    report_of(state, cancelled=1, kept=0)
    eventually(lambda: server.requests[0].end == "Aborted")


def test_a_speculation_still_on_its_way_is_asked_for_again(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: True
    server.promote = lambda request: "running" if len(server.promotions) > 2 else "unknown"
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend)
    eventually(lambda: len(server.promotions) == 3)
    server.requests[0].go.set()
    assert state["answer"] == "[35:'o? ']"
    assert len(server.requests) == 1


def test_a_server_that_cannot_promote_gets_the_request_again(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: request.speculative
    server.missing = ("/rag/promote",)
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    report_of(state, cancelled=1)


def test_a_server_without_the_routes_gets_no_speculations_and_is_asked_once(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.missing = ("/rag/promote", "/rag/pool")
    polls: list[str] = []
    pool = backend.speculator.gate._ask
    backend.speculator.gate._ask = lambda: polls.append("") or pool()  # type: ignore[func-returns-value]
    for _ in range(3):
        script = Scripted(GUESS, lambda: eventually(lambda: polls), OTHER, GUESS)
        assert ask(script).run(backend=backend)["answer"] == "[35:'o? ']"
    assert [r.speculative for r in server.requests] == [False] * 3
    assert len(polls) == 1


def test_a_choice_promoted_half_way_goes_on_as_an_ordinary_request(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: True
    retriever = Scripted(GUESS, sent(server), GUESS)

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(retriever, "q") + sgl.select("kind", ["pets", "stars"])

    state = program.run(backend=backend)
    eventually(lambda: server.promotions)
    server.hold = lambda request: False
    server.requests[0].go.set()
    assert state["kind"] in ("pets", "stars")
    assert [r.speculative for r in server.requests] == [True, False]
    assert server.promotions == [server.requests[0].rids]
    report_of(state, kept=1)


def test_another_question_than_the_one_asked_ahead_is_asked_anew(
    server: SpeculativeServer, backend: RagEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_config, "skip_special_tokens_in_output", True)

    def change() -> None:
        sent(server)()
        monkeypatch.setattr(global_config, "skip_special_tokens_in_output", False)

    state = ask(Scripted(GUESS, change, GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    assert [r.body["sampling_params"]["skip_special_tokens"] for r in server.requests] == [
        True,
        False,
    ]
    report_of(state, cancelled=1, kept=0)


def test_a_template_that_gives_another_text_each_time_is_never_wrong(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    count = iter(range(100))
    state = ask(
        Scripted(GUESS, sent(server), GUESS), template=lambda d: f"{next(count)}{d.text}"
    ).run(backend=backend)
    assert state["docs"] == "2Cats purr.3Dogs bark."
    assert state["answer"]
    assert server.ordinary[0].prompt == "Read. 2Cats purr.3Dogs bark.Who? "
    report_of(state, cancelled=1)


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


def test_a_request_that_the_server_refuses_for_itself_is_raised_as_without_speculation(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.answer = lambda *_, **__: {"error": {"message": "too long"}}  # type: ignore[method-assign]
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend)
    with pytest.raises(Exception, match="too long"):
        state["answer"]
    assert [r.speculative for r in server.requests] == [True, False]
    report_of(state, failed=1)


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

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, sent(server), GUESS), "q")
        s += "text" + sgl.gen("answer")
        sent(server)()
        # Nothing in a program can take back what it has appended.
        with s.stream_executor.queue.mutex:
            s.stream_executor.queue.queue.clear()
            s.stream_executor.queue.unfinished_tasks = 1

    program.run(backend=backend)
    eventually(lambda: server.requests and server.requests[0].end == "Aborted")


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
            eventually(lambda: any(r.prompt.endswith(f"#{i}#") for r in server.speculations))

        s += rag_retrieve(Scripted(OTHER, GUESS, arrived, GUESS), "q") + f"#{i}#"
        s += sgl.gen("answer")

    states = program.run_batch([{"i": i} for i in range(20)], backend=backend)
    assert [s["answer"] for s in states] == [
        f"[{24 + len(f'#{i}#')}:{f'#{i}#'[-3:]!r}]" for i in range(20)
    ]
    assert server.ordinary == []
    eventually(lambda: settled(backend))
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


def test_the_stop_strings_of_an_expression_do_not_grow(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    gen = sgl.gen("answer", stop=["x"])

    @sgl.function
    def program(s: Any) -> None:
        for i in range(3):
            s += rag_retrieve(Scripted(GUESS, sent(server, i + 1), GUESS), "q") + gen

    program.run(backend=backend).sync()
    assert [r.body["sampling_params"]["stop"] for r in server.requests] == [["x", "<|im_end|>"]] * 3
    assert [r.speculative for r in server.requests] == [True] * 3


def test_other_backends_report_the_search(stub: Any) -> None:
    state = ask(Scripted(OTHER, GUESS)).run(
        backend=sgl.RuntimeEndpoint(stub.url, chat_template_name="chatml")
    )
    report = report_of(state, stages=2, started=0)
    assert report.search_s == report.search_not_overlapped_s > 0
