"""A failure on a state's thread reaches the program, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import Document, RagEndpoint, Stage, rag_retrieve
from rag_radix_frontend.errors import RequestError

pytestmark = pytest.mark.filterwarnings("ignore:Error in stream_executor")

HANG_S = 30


class DatabaseDown(Exception):
    pass


class Broken:
    """A retriever that fails, at once or when told to."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self._gate = gate

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        if self._gate is not None:
            self._gate.wait()
        raise DatabaseDown(query)
        yield


@pytest.fixture
def backend(stub: Any) -> RagEndpoint:
    return RagEndpoint(stub.url, chat_template_name="chatml")


def bounded(call: Callable[[], Any]) -> Any:
    """The result or exception of a call that must come back."""
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "the program hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def run(program: Any, backend: Any, **arguments: Any) -> Any:
    return bounded(lambda: sgl.function(program).run(backend=backend, **arguments))


@pytest.mark.parametrize("name", ["docs", "answer"])
def test_reading_a_variable_raises_what_the_retriever_raised(
    backend: RagEndpoint, stub: Any, name: str
) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(Broken(), "q") + sgl.gen("answer")
        s[name]

    with pytest.raises(DatabaseDown, match="q"):
        run(program, backend)
    assert stub.asked == []


def test_a_program_that_reads_nothing_ends_and_its_state_raises(backend: RagEndpoint) -> None:
    def program(s: Any) -> None:
        s += "a" + rag_retrieve(Broken(), "q")

    state = run(program, backend)
    for read in (lambda: state["docs"], state.text, state.messages, lambda: state["other"]):
        with pytest.raises(DatabaseDown):
            bounded(read)
    assert isinstance(bounded(state.error), DatabaseDown)
    bounded(state.sync)
    assert "a" in repr(state)


def test_appending_after_the_failure_raises_instead_of_queueing_for_nobody(
    backend: RagEndpoint,
) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(Broken(), "q")
        while s.stream_executor.worker.is_alive():
            time.sleep(0.001)
        s += sgl.gen("answer")

    with pytest.raises(DatabaseDown):
        run(program, backend)


def test_a_program_that_appends_while_its_retrieval_fails_always_ends(
    backend: RagEndpoint,
) -> None:
    for _ in range(200):
        gate = threading.Event()

        def program(s: Any, gate: threading.Event) -> None:
            s += rag_retrieve(Broken(gate), "q")
            gate.set()
            for i in range(50):
                s += sgl.gen(f"answer{i}")
            s["answer49"]

        with pytest.raises(DatabaseDown):
            run(program, backend, gate=gate)


def test_variables_set_before_the_failure_stay_readable(backend: RagEndpoint, listed: Any) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals") + rag_retrieve(Broken(), "q", name="more")

    state = run(program, backend)
    assert bounded(lambda: state["docs"]).ids == ["animals/cats", "animals/dogs"]
    with pytest.raises(DatabaseDown):
        bounded(lambda: state["more"])


@pytest.mark.parametrize("join", ["gather_variable", "concate_and_append"])
def test_the_failure_of_a_fork_is_raised_by_its_join(backend: RagEndpoint, join: str) -> None:
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks[0] += "fine"
        forks[1] += rag_retrieve(Broken(), "q")
        forks.join(join)

    with pytest.raises(DatabaseDown):
        run(program, backend)


def test_forking_after_a_failed_retrieval_raises_and_leaves_no_thread(
    backend: RagEndpoint,
) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(Broken(), "q")
        s.fork(2)

    before = threading.active_count()
    with pytest.raises(DatabaseDown):
        run(program, backend)
    deadline = time.monotonic() + HANG_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_without_a_thread_the_append_itself_raises(backend: RagEndpoint) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(Broken(), "q")

    with pytest.raises(DatabaseDown):
        run(program, backend, use_thread=False)


def test_one_failure_does_not_take_the_rest_of_a_batch_along(
    backend: RagEndpoint, listed: Any
) -> None:
    @sgl.function
    def program(s: Any, retriever: Any) -> None:
        s += rag_retrieve(retriever, "animals") + sgl.gen("answer")

    batch = [{"retriever": listed}, {"retriever": Broken()}, {"retriever": listed}]
    fine, failed, also_fine = bounded(lambda: program.run_batch(batch, backend=backend))
    assert fine["answer"] == also_fine["answer"] == "[24]"
    with pytest.raises(DatabaseDown):
        failed["answer"]


@pytest.mark.parametrize("name", [None, "docs", "answer"])
def test_a_stream_ends_with_the_failure(backend: RagEndpoint, name: str | None) -> None:
    gate = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        s += "a"
        s += rag_retrieve(Broken(gate), "q") + sgl.gen("answer")

    state = program.run(backend=backend, stream=True)
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(DatabaseDown):
        bounded(lambda: list(state.text_iter(name)))

    async def read() -> list[str]:
        return [text async for text in state.text_async_iter(name)]

    with pytest.raises(DatabaseDown):
        bounded(lambda: asyncio.run(read()))


def test_a_template_that_raises_reaches_the_program(backend: RagEndpoint, listed: Any) -> None:
    def title(document: Document) -> str:
        return str(document.metadata["title"])

    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals", template=title)
        s["docs"]

    with pytest.raises(KeyError, match="title"):
        run(program, backend)


def test_a_request_the_server_refuses_reaches_the_program(
    backend: RagEndpoint, stub: Any, listed: Any
) -> None:
    stub.reply = lambda body: (400, {"error": {"message": "documents[0].end: out of range"}})

    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals") + sgl.gen("answer")
        s["answer"]

    with pytest.raises(RequestError, match=r"documents\[0\]\.end"):
        run(program, backend)


def test_a_program_that_raises_by_itself_ends(backend: RagEndpoint, listed: Any) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(program, backend)
