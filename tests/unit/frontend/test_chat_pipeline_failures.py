"""`retrieve_and_generate()` when something fails or is given up."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rag_radix_frontend import Stage, chat_pipeline, retrieve_and_generate
from rag_radix_frontend.chat_pipeline import _server_of, _stages
from rag_radix_frontend.errors import RetrievalError
from unit.frontend.chat_client import LIMIT_S, A, B, ask, build_messages, run


@pytest.mark.parametrize("is_left", [False, True])
def test_a_stream_that_fails_before_its_first_chunk_is_asked_for_again(is_left):
    async def scenario(client, steps):
        answer = ask(client, steps, stream=True)
        steps.send(A)
        guess = await client.request(0)
        steps.send(A, final=True)
        result = await answer
        chunks = result.completion
        guess.pieces.put_nowait(ConnectionError("gone"))
        first = asyncio.create_task(anext(chunks))
        request = await client.request(1)
        assert not request.speculative
        request.pieces.put_nowait("one")
        assert await first == "one"
        assert (result.retrieval.failed, result.retrieval.kept) == (1, 0)
        assert result.retrieval.search_not_overlapped_s == result.retrieval.search_s
        if is_left:
            await chunks.aclose()
        else:
            request.finish("two")
            assert [chunk async for chunk in chunks] == ["two"]
        assert request.ended

    run(scenario)


def test_a_stream_that_fails_later_raises_that():
    async def scenario(client, steps):
        answer = ask(client, steps, stream=True)
        steps.send(A)
        guess = await client.request(0)
        steps.send(A, final=True)
        guess.pieces.put_nowait("one")
        chunks = (await answer).completion
        assert await anext(chunks) == "one"
        guess.pieces.put_nowait(ConnectionError("gone"))
        with pytest.raises(ConnectionError, match="gone"):
            await anext(chunks)
        assert len(client.requests) == 1

    run(scenario)


@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_a_failed_speculation_is_nobodys_problem(when):
    """Before it would become the answer, while the server is told so, or after that."""

    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        if when != "after":
            client.promoting.clear()
        if when != "before":
            steps.send(A, final=True)
            await client.promotion()
        while when == "after" and _server_of(client).gate._inside:
            await asyncio.sleep(0)
        guess.pieces.put_nowait(ConnectionError("gone"))
        if when == "before":
            await guess.end()
            steps.send(A, final=True)
        request = await client.request(1)
        assert not request.speculative
        request.finish("normal")
        result = await answer
        assert result.completion == "normal"
        assert (result.retrieval.failed, result.retrieval.kept) == (1, 0)
        assert result.retrieval.search_not_overlapped_s == result.retrieval.search_s
        assert len(client.promoted) == (when != "before"), "what has failed needs no promotion"
        client.promoting.set()

    run(scenario)


def test_a_speculation_ended_while_it_is_promoted_is_asked_for_in_the_ordinary_way():
    async def scenario(client, steps):
        client.promoting.clear()
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        steps.send(A, final=True)
        await client.promotion()
        guess.pieces.put_nowait(RuntimeError("speculation ended: 1 waits"))
        request = await client.request(1)
        assert not request.speculative
        request.finish("normal")
        result = await answer
        assert result.completion == "normal"
        assert (result.retrieval.ended, result.retrieval.kept) == (1, 0)
        client.promoting.set()

    run(scenario)


def test_an_exception_in_the_retriever_ends_the_speculation():
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        steps.stages.put(OSError("index gone"))
        with pytest.raises(OSError, match="index gone"):
            await answer
        while not guess.ended:
            await asyncio.sleep(0)

    run(scenario)


@pytest.mark.parametrize(
    "error",
    [
        StopIteration(),
        StopAsyncIteration(),
        concurrent.futures.CancelledError(),
        asyncio.CancelledError(),
        SystemExit(),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_what_would_end_the_caller_unnoticed_is_an_error_of_the_retriever(error):
    class Naive:
        def retrieve(self, query: str, k: int) -> Any:
            raise error

    async def scenario(client, _):
        with pytest.raises(RetrievalError, match=type(error).__name__) as raised:
            await ask(client, Naive())
        assert raised.value.__cause__ is error

    run(scenario)


class OnOneThread:
    """A search with something open that belongs to its thread, as connections to SQLite do."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.go_on = threading.Event()
        self.closed = threading.Event()

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        try:
            for is_last in (False, True):
                self.threads.append(threading.get_ident())
                yield Stage((), is_last)
                assert self.go_on.wait(LIMIT_S)
            raise AssertionError("it isn't asked for what is behind the last stage")
        finally:
            self.threads.append(threading.get_ident())
            self.closed.set()


@pytest.mark.parametrize("end", ["final", "left", "loop closed"])
def test_a_search_is_on_one_thread_to_its_end(end):
    search = OnOneThread()
    loop = asyncio.new_event_loop()
    stages = _stages(search, "?", 1)
    assert loop.run_until_complete(anext(stages)) == Stage((), False)
    if end == "final":
        search.go_on.set()
        assert loop.run_until_complete(anext(stages)) == Stage((), True)
    if end != "loop closed":
        loop.run_until_complete(stages.aclose())
    loop.close()
    search.go_on.set()
    assert search.closed.wait(LIMIT_S)
    assert len(set(search.threads)) == 1
    assert threading.get_ident() not in search.threads


def test_a_search_nobody_waits_for_any_more_is_never_begun(monkeypatch):
    waiting = []
    pool = SimpleNamespace(submit=waiting.append)
    monkeypatch.setattr(chat_pipeline, "_THREADS", SimpleNamespace(pool=pool))

    async def scenario(client, _):
        search = OnOneThread()
        answer = ask(client, search)
        while not waiting:
            await asyncio.sleep(0)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        waiting[0]()
        assert not search.threads

    run(scenario)


def test_a_caller_that_gives_up_ends_the_speculation():
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        while not guess.ended:
            await asyncio.sleep(0)
        steps.stages.put(None)

    run(scenario)


def test_a_retriever_without_a_final_stage_is_an_error():
    async def scenario(client, steps):
        answer = ask(client, steps, speculative=False)
        steps.send(A)
        steps.stages.put(None)
        with pytest.raises(RetrievalError, match="without a final stage"):
            await answer

    run(scenario)


def test_messages_that_cant_be_made_for_provisional_documents_dont_matter():
    def picky(documents):
        if A in documents:
            raise KeyError("a")
        return build_messages(documents)

    async def scenario(client, steps):
        answer = asyncio.create_task(retrieve_and_generate(client, steps, "?", picky))
        steps.send(A)
        steps.send(B, final=True)
        request = await client.request(0)
        request.finish("b")
        assert (await answer).completion == "b"

    run(scenario)
