"""`retrieve_and_generate()` against a client that keeps its requests open until told."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rag_radix_frontend import (
    Document,
    ScoredDocument,
    Stage,
    chat_pipeline,
    chat_retrievals,
    retrieve_and_generate,
)
from rag_radix_frontend.chat_pipeline import _server_of, _servers
from rag_radix_frontend.chat_server import ChatServer
from rag_radix_frontend.errors import RetrievalError

A, B = (Document(id=name, text=f"text of {name}") for name in "ab")
LIMIT_S = 10


class Steps:
    """A retriever whose stages come when the test sends them."""

    def __init__(self) -> None:
        self.stages: queue.Queue[Stage | Exception | None] = queue.Queue()

    def send(self, *documents: Document, final: bool = False) -> None:
        self.stages.put(Stage(tuple(ScoredDocument(each, 1.0) for each in documents), final))

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        while (stage := self.stages.get(timeout=LIMIT_S)) is not None:
            if isinstance(stage, Exception):
                raise stage
            yield stage


class Request:
    """A completion under way at the fake server."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.content = options["messages"][0]["content"]
        extra = options["extra_body"]
        self.rid = extra.get("rid")
        self.speculative = extra["custom_params"]["rag"].get("speculative", False)
        self.stream = options.get("stream", False)
        self.pieces: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.ended = False

    def finish(self, *pieces: str) -> None:
        for piece in (*pieces, None):
            self.pieces.put_nowait(piece)

    async def chunks(self):
        try:
            while (piece := await self.pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self.ended = True


class ChunkStream:
    """As much of `openai.AsyncStream` as is used."""

    def __init__(self, request: Request) -> None:
        self._chunks = request.chunks()

    def __aiter__(self) -> Any:
        return self._chunks

    async def __aenter__(self) -> ChunkStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._chunks.aclose()


class Said(str):
    """A completion."""

    usage: dict[str, Any] | None = None


class FakeClient:
    """As much of `openai.AsyncOpenAI` as is used, and the server behind it."""

    base_url = "http://server/v1/"

    def __init__(self) -> None:
        self.chat = self.completions = self
        self.requests: list[Request] = []
        self.arrived = asyncio.Condition()
        self.pool = {"waiting": 0, "max_prefill_bs": 4, "accepts": True}
        self.states: dict[str, str] = {}
        self.aborted: list[str] = []
        self.promoted: list[str] = []
        self.usage: dict[str, Any] | None = None

    def with_options(self, max_retries: int) -> FakeClient:
        return self

    async def create(self, **options: Any) -> Any:
        request = Request(options)
        async with self.arrived:
            self.requests.append(request)
            self.arrived.notify_all()
        if request.stream:
            return ChunkStream(request)
        answer = Said("".join([piece async for piece in request.chunks()]))
        answer.usage = self.usage
        return answer

    async def get(self, url: str, cast_to: type) -> Any:
        assert url == "http://server/rag/pool"
        return self.pool

    async def post(self, url: str, body: dict[str, Any], cast_to: type) -> Any:
        if url == "http://server/rag/promote":
            self.promoted += body["rids"]
            return {"rids": {rid: self.states.get(rid, "running") for rid in body["rids"]}}
        assert url == "http://server/abort_request"
        self.aborted.append(body["rid"])
        for request in self.requests:
            if request.rid == body["rid"]:
                request.finish()
        return ""

    async def request(self, number: int) -> Request:
        """The `number`-th request, when it has come."""
        async with asyncio.timeout(LIMIT_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) > number)
        return self.requests[number]


def build_messages(documents):
    return [{"role": "user", "content": " ".join(each.text for each in documents)}]


def ask(client, retriever, **options):
    return asyncio.create_task(
        retrieve_and_generate(client, retriever, "?", build_messages, model="m", **options)
    )


def run(scenario):
    async def limited():
        async with asyncio.timeout(2 * LIMIT_S):
            await scenario(FakeClient(), Steps())

    asyncio.run(limited())


def test_a_speculation_on_the_final_documents_is_the_answer():
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        assert guess.speculative
        steps.send(A, final=True)
        guess.finish("yes")
        result = await answer
        assert result.completion == "yes"
        assert [scored.document for scored in result.documents] == [A]
        assert len(client.requests) == 1
        assert client.promoted == [guess.rid]
        assert (result.retrieval.started, result.retrieval.kept) == (1, 1)
        assert result.retrieval.search_not_overlapped_s < result.retrieval.search_s
        assert chat_retrievals(client) == result.retrieval

    run(scenario)


def test_other_final_documents_end_it_and_are_asked_for():
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        steps.send(B, final=True)
        request = await client.request(1)
        assert not request.speculative
        assert request.content == "text of b"
        request.finish("no")
        result = await answer
        assert result.completion == "no"
        while not guess.ended:
            await asyncio.sleep(0)
        assert client.aborted == [guess.rid]
        assert (result.retrieval.cancelled, result.retrieval.kept) == (1, 0)
        assert result.retrieval.search_not_overlapped_s == result.retrieval.search_s

    run(scenario)


@pytest.mark.parametrize("is_complete", [False, True])
def test_what_a_wrong_guess_computed_is_told_where_the_server_tells(is_complete):
    usage = {"prompt_tokens": 100, "completion_tokens": 7}

    async def scenario(client, steps):
        client.usage = {**usage, "prompt_tokens_details": {"cached_tokens": 60}}
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        if is_complete:
            guess.finish("long since")
            while not guess.ended:
                await asyncio.sleep(0)
        steps.send(B, final=True)
        (await client.request(1)).finish("no")
        await answer
        while chat_retrievals(client).wasted_tokens != 47:
            await asyncio.sleep(0)

    run(scenario)


def test_a_stream_goes_on_from_what_is_there():
    async def scenario(client, steps):
        answer = ask(client, steps, stream=True)
        steps.send(A)
        guess = await client.request(0)
        guess.pieces.put_nowait("one")
        steps.send(A, final=True)
        result = await answer
        seen = []
        async for chunk in result.completion:
            seen.append(chunk)
            if chunk == "one":
                guess.finish("two")
        assert seen == ["one", "two"]
        assert len(client.requests) == 1

    run(scenario)


def test_a_stream_that_is_left_is_ended():
    async def scenario(client, steps):
        answer = ask(client, steps, stream=True)
        steps.send(A)
        guess = await client.request(0)
        guess.pieces.put_nowait("one")
        steps.send(A, final=True)
        chunks = (await answer).completion
        async for _ in chunks:
            break
        await chunks.aclose()
        while not guess.ended:
            await asyncio.sleep(0)
        assert client.aborted == [guess.rid]

    run(scenario)


@pytest.mark.parametrize("is_left", [False, True])
def test_a_stream_that_fails_before_its_first_chunk_is_asked_for_again(is_left):
    async def scenario(client, steps):
        answer = ask(client, steps, stream=True)
        steps.send(A)
        guess = await client.request(0)
        steps.send(A, final=True)
        chunks = (await answer).completion
        guess.pieces.put_nowait(ConnectionError("gone"))
        first = asyncio.create_task(anext(chunks))
        request = await client.request(1)
        assert not request.speculative
        request.pieces.put_nowait("one")
        assert await first == "one"
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


def test_what_the_server_doesnt_promote_is_asked_for_again():
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        client.states[guess.rid] = "unknown"
        steps.send(A, final=True)
        request = await client.request(1)
        assert not request.speculative
        request.finish("normal")
        assert (await answer).completion == "normal"

    run(scenario)


@pytest.mark.parametrize("said", ["speculation refused: 4 wait", "speculation ended: 1 waits"])
def test_a_candidate_turned_away_starts_when_the_pool_drains(said):
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        first = await client.request(0)
        client.pool = {"waiting": 4, "max_prefill_bs": 4, "accepts": False}
        first.pieces.put_nowait(RuntimeError(said))
        await asyncio.sleep(0.1)
        assert len(client.requests) == 1
        client.pool = {"waiting": 3, "max_prefill_bs": 4, "accepts": True}
        second = await client.request(1)
        assert second.speculative
        assert second.rid != first.rid
        second.finish("late")
        steps.send(A, final=True)
        result = await answer
        assert result.completion == "late"
        assert (result.retrieval.started, result.retrieval.kept) == (2, 1)
        assert result.retrieval.refused + result.retrieval.ended == 1

    run(scenario)


def test_a_full_server_is_sent_no_speculations():
    async def scenario(client, steps):
        client.pool = {"waiting": 4, "max_prefill_bs": 4, "accepts": False}
        answer = ask(client, steps)
        for _ in range(2):
            steps.send(A)
            steps.send(B)
        steps.send(A, final=True)
        request = await client.request(0)
        assert not request.speculative
        request.finish("normal")
        result = await answer
        assert result.completion == "normal"
        assert result.retrieval.started == 0

    run(scenario)


def test_speculation_can_be_off_and_is_for_several_samples():
    async def scenario(client, steps):
        for options in ({"speculative": False}, {"n": 2}):
            answer = ask(client, steps, **options)
            steps.send(A)
            steps.send(A, final=True)
            request = await client.request(len(client.requests))
            assert not request.speculative
            request.finish("x")
            assert (await answer).completion == "x"

    run(scenario)


def test_a_failed_speculation_is_nobodys_problem():
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        guess.pieces.put_nowait(ConnectionError("gone"))
        steps.send(A, final=True)
        request = await client.request(1)
        request.finish("normal")
        result = await answer
        assert result.completion == "normal"
        assert result.retrieval.failed == 1

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


def test_a_retriever_that_looks_for_what_is_not_there_raises_that():
    class Naive:
        def retrieve(self, query: str, k: int) -> Any:
            return [next(iter(()))]

    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(RetrievalError, match="StopIteration"):
                await retrieve_and_generate(FakeClient(), Naive(), "q", lambda _: [])

    asyncio.run(run())


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


def test_event_loops_that_share_a_client_keep_what_they_know_of_its_server():
    async def server() -> ChatServer:
        return _server_of(client)

    client = FakeClient()
    loops = [asyncio.new_event_loop() for _ in range(2)]
    first, second, again = (loops[i].run_until_complete(server()) for i in (0, 1, 0))
    assert first is again
    assert first is not second
    for loop in loops:
        loop.close()
    asyncio.run(server())
    assert len(_servers[client]) == 1


def test_what_is_replaced_at_once_is_never_sent(monkeypatch):
    monkeypatch.setattr(chat_pipeline, "_LONGEST_PAUSE_S", LIMIT_S)
    # Every look at the clock finds that the search has taken so long.
    clock = SimpleNamespace(perf_counter=itertools.count(step=LIMIT_S).__next__)
    monkeypatch.setattr(chat_pipeline, "time", clock)

    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        steps.send(B)
        steps.send(A, final=True)
        request = await client.request(0)
        assert not request.speculative
        request.finish("yes")
        result = await answer
        assert (result.retrieval.started, result.retrieval.cancelled) == (0, 0)

    run(scenario)
