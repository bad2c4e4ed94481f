"""A client of chats that keeps its requests open until told, and searches that go on when told."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

from rag_radix_frontend import Document, ScoredDocument, Stage, retrieve_and_generate

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

    async def end(self) -> None:
        """Wait until nobody reads it any more."""
        async with asyncio.timeout(LIMIT_S):
            while not self.ended:
                await asyncio.sleep(0)


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
        # Cleared, it doesn't say of what it was told to promote whether it has.
        self.promoting = asyncio.Event()
        self.promoting.set()
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
            await self.promoting.wait()
            return {"rids": {rid: self.states.get(rid, "running") for rid in body["rids"]}}
        assert url == "http://server/abort_request"
        self.aborted.append(body["rid"])
        for request in self.requests:
            if request.rid == body["rid"]:
                request.finish()
        return ""

    async def promotion(self) -> None:
        """Wait until it is told to promote something."""
        async with asyncio.timeout(LIMIT_S):
            while not self.promoted:
                await asyncio.sleep(0)

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
