"""Requests made for an OpenAI client arrive as it would have sent them, and so do their answers."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import openai
import pytest
from openai import NOT_GIVEN, AsyncAzureOpenAI, AsyncOpenAI
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from rag_radix_frontend.chat_connection import (
    ClientConnection,
    PlainConnection,
    computed_tokens_of,
    connection_of,
)
from rag_radix_frontend.chat_pipeline import _server_of
from rag_radix_frontend.errors import RequestError
from unit.frontend.speculative_server import WAIT_S, eventually

CHOICE = {"index": 0, "finish_reason": "stop", "logprobs": None}
WHOLE = {
    "id": "0",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{**CHOICE, "message": {"role": "assistant", "content": "yes"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    "metadata": {"weight_version": "0"},
}
CHUNKS = [
    {**WHOLE, "object": "chat.completion.chunk", "choices": [{**CHOICE, "delta": {"content": c}}]}
    for c in "yes"
]
OPTIONS = {
    "model": "m",
    "messages": [{"role": "user", "content": "Grüße?"}],
    "temperature": 0.0,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "extra_body": {"rid": "r", "custom_params": {"rag": {"documents": []}}},
}


class Stub(ThreadingHTTPServer):
    """Answers with `status`, and then with `said` or what is above; notes what it was asked. While
    it is `holding`, a completion is only answered when it is aborted."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.status, self.said = 200, ""
        self.events: list[Any] = [*CHUNKS, "[DONE]"]
        self.holding = False
        self.aborted = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, dict(self.headers)))
        if self.server.status != 200:
            said = {"error": {"message": self.server.said}}
            self._reply(json.dumps(said), "application/json")
        elif self.path == "/abort_request":
            self.server.aborted.set()
            self._reply("", "text/plain")
        elif self.server.holding and not self.server.aborted.wait(WAIT_S):
            raise TimeoutError
        elif body.get("stream"):
            texts = (e if isinstance(e, str) else json.dumps(e) for e in self.server.events)
            self._reply("".join(f"data: {text}\n\n" for text in texts), "text/event-stream")
        else:
            self._reply(json.dumps(WHOLE), "application/json")

    def do_GET(self) -> None:
        self.server.asked.append((self.path, {}, dict(self.headers)))
        self._reply('{"waiting": 0}', "application/json")

    def _reply(self, text: str, kind: str) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def listening() -> Iterator[Stub]:
    with Stub() as stub:
        thread = threading.Thread(target=stub.serve_forever, args=(0.01,))
        thread.start()
        yield stub
        stub.shutdown()
        thread.join()


@pytest.fixture
def stub(listening: Stub) -> Stub:
    listening.asked, listening.status, listening.events = [], 200, [*CHUNKS, "[DONE]"]
    listening.holding, listening.aborted = False, threading.Event()
    return listening


def with_client(stub: Stub, use: Callable[[AsyncOpenAI], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        async with AsyncOpenAI(base_url=stub.url, api_key="secret", **settings) as client:
            return await use(client)

    return asyncio.run(run())


async def answers(connection: Any, **options: Any) -> list[Any]:
    is_chunk = options.get("stream", False)
    return [
        connection.typed(answer, is_chunk=is_chunk)
        async for answer in connection.answers({**OPTIONS, **options})
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_asked_for_and_returned_as_by_the_client(stub: Stub, stream: bool) -> None:
    async def use(client: AsyncOpenAI) -> None:
        connection = connection_of(client)
        assert type(connection) is PlainConnection
        ours = await answers(connection, stream=stream)
        theirs = await answers(ClientConnection(client), stream=stream)
        assert [type(each) for each in ours] == [type(each) for each in theirs]
        assert type(ours[0]) is (ChatCompletionChunk if stream else ChatCompletion)
        assert [each.model_dump() for each in ours] == [each.model_dump() for each in theirs]
        if not stream:
            assert ours[0]._request_id == theirs[0]._request_id

    with_client(stub, use, default_headers={"X-Tenant": "t"})
    (our_path, our_body, our_headers), (their_path, their_body, their_headers) = stub.asked
    assert (our_path, our_body) == (their_path, their_body)
    for name in ("Authorization", "X-Tenant", "User-Agent", "Content-Type"):
        assert our_headers[name] == their_headers[name]


@pytest.mark.parametrize(
    "options", [{"timeout": 5.0}, {"extra_headers": {"X-More": "m"}}, {"seed": NOT_GIVEN}]
)
def test_what_only_the_client_understands_it_sends(stub: Stub, options: dict[str, Any]) -> None:
    with_client(stub, lambda client: answers(connection_of(client), **options))
    ((_, body, headers),) = stub.asked
    assert "seed" not in body
    assert body["rid"] == "r"
    assert headers.get("X-More") == options.get("extra_headers", {}).get("X-More")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_refusal_says_so(stub: Stub, stream: bool, is_plain: bool) -> None:
    stub.status, stub.said = 503, "speculation refused: 4 requests wait"

    async def use(client: AsyncOpenAI) -> None:
        connection = connection_of(client) if is_plain else ClientConnection(client)
        with pytest.raises(openai.APIError, match="speculation refused"):
            await answers(connection, stream=stream)

    with_client(stub, use)
    assert len(stub.asked) == 1


@pytest.mark.parametrize(
    ("details", "tokens"), [({"cached_tokens": 60}, 47), ({"cached_tokens": 0}, 107), (None, 0)]
)
def test_what_was_computed_is_known_where_the_server_tells_what_was_cached(
    details: Any, tokens: int
) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": details}
    answer = {**WHOLE, "usage": usage}
    assert computed_tokens_of(answer) == tokens
    assert computed_tokens_of(ChatCompletion.construct(**answer)) == tokens
    assert computed_tokens_of({**WHOLE, "usage": None}) == 0


ENDS = {
    "said": ({"error": {"message": "speculation ended: others wait"}}, openai.APIError),
    "cut": ("{", openai.APIConnectionError),
}


@pytest.mark.parametrize(("end", "kind"), ENDS.values(), ids=ENDS)
def test_an_error_within_a_stream_is_one_of_openais_after_what_came_before(
    stub: Stub, end: Any, kind: type[Exception]
) -> None:
    stub.events = [CHUNKS[0], end]
    got = []

    async def use(client: AsyncOpenAI) -> None:
        async for chunk in connection_of(client).answers({**OPTIONS, "stream": True}):
            got.append(chunk)

    with pytest.raises(kind, match=r"speculation ended|closed the stream"):
        with_client(stub, use)
    assert got == CHUNKS[:1]


def test_a_server_that_is_silent_for_longer_than_the_client_waits_has_timed_out(
    stub: Stub,
) -> None:
    stub.holding = True
    with pytest.raises(openai.APITimeoutError):
        with_client(stub, lambda client: answers(connection_of(client)), timeout=0.01)
    stub.aborted.set()


def test_chunks_need_not_say_what_they_are(stub: Stub) -> None:
    stub.events = [{k: v for k, v in CHUNKS[0].items() if k != "object"}, "[DONE]"]
    (chunk,) = with_client(stub, lambda client: answers(connection_of(client), stream=True))
    assert type(chunk) is ChatCompletionChunk
    assert chunk.choices[0].delta.content == "y"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_under_way_when_the_loop_ends_is_aborted(stub: Stub, stream: bool) -> None:
    stub.holding = True

    async def use(client: AsyncOpenAI) -> None:
        # The loop cancels it when this ends.
        use.task = asyncio.create_task(answers(connection_of(client), stream=stream))  # type: ignore[attr-defined]
        await asyncio.to_thread(eventually, lambda: stub.asked)

    with_client(stub, use)
    assert stub.aborted.wait(WAIT_S)
    assert stub.asked[1][:2] == ("/abort_request", {"rid": "r"})


def test_a_client_that_is_used_no_more_is_forgotten(stub: Stub) -> None:
    async def use(client: AsyncOpenAI) -> list[weakref.ref[Any]]:
        server = _server_of(client)
        await answers(server.connection)
        return [weakref.ref(client), weakref.ref(server)]

    def are_gone() -> bool:
        gc.collect()
        return not any(each() for each in known)

    gc.freeze()  # Looking through all that there is takes long.
    try:
        known = with_client(stub, use)
        eventually(are_gone)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("kind", [PlainConnection, ClientConnection])
def test_routes_are_called_with_the_clients_key(stub: Stub, kind: Any) -> None:
    async def use(client: AsyncOpenAI) -> tuple[Any, Any]:
        connection = kind(client)
        pool = await asyncio.to_thread(connection.call, "/rag/pool")
        return pool, await asyncio.to_thread(connection.call, "/abort_request", {"rid": "r"})

    pool, nothing = with_client(stub, use)
    assert pool == {"waiting": 0}
    assert not nothing
    assert [path for path, _, _ in stub.asked] == ["/rag/pool", "/abort_request"]
    assert {headers["Authorization"] for *_, headers in stub.asked} == {"Bearer secret"}


@pytest.mark.parametrize("kind", [PlainConnection, ClientConnection])
def test_the_key_is_the_one_that_the_client_has_now(stub: Stub, kind: Any) -> None:
    async def use(client: AsyncOpenAI) -> None:
        connection = kind(client)
        client.api_key = "new"
        await answers(connection)
        await asyncio.to_thread(connection.call, "/rag/pool")

    with_client(stub, use)
    assert [headers["Authorization"] for *_, headers in stub.asked] == ["Bearer new"] * 2


def test_what_the_client_sends_ends_with_its_reader(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    async def answers(*_: Any) -> AsyncIterator[str]:
        try:
            yield "chunk"
        finally:
            ended.append(True)

    monkeypatch.setattr(ClientConnection, "answers", answers)

    async def use(client: AsyncOpenAI) -> None:
        chunks = connection_of(client).answers({**OPTIONS, "stream": True, "timeout": 5.0})
        assert await anext(chunks) == "chunk"
        await chunks.aclose()
        assert ended

    with_client(stub, use)


@pytest.mark.parametrize("kind", [PlainConnection, ClientConnection])
def test_the_status_of_a_failed_call_is_known(stub: Stub, kind: Any) -> None:
    stub.status, stub.said = 404, "not found"

    async def use(client: AsyncOpenAI) -> None:
        await asyncio.to_thread(kind(client).call, "/rag/promote", {"rids": []})

    with pytest.raises(RequestError) as raised:
        with_client(stub, use)
    assert raised.value.status == 404


class StoppedLoop(asyncio.SelectorEventLoop):
    """Says when a thread has given it something to do, which it will never do."""

    was_asked = False

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(*args, **kwargs)
        self.was_asked = True
        return handle


def test_a_call_ends_with_the_loop_that_was_to_make_it(stub: Stub) -> None:
    async def connection() -> ClientConnection:
        return ClientConnection(AsyncOpenAI(base_url=stub.url, api_key="secret"))

    loop = StoppedLoop()
    call = loop.run_until_complete(connection()).call
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(call, "/rag/pool")
        eventually(lambda: loop.was_asked)
        loop.close()
        with pytest.raises(RequestError, match="closed"):
            asked.result(WAIT_S)
    assert stub.asked == []


class Derived(AsyncOpenAI):
    """May do anything."""


async def _key() -> str:
    return "fresh"


ADDRESS: dict[str, Any] = {"base_url": "http://server/v1", "api_key": "k"}


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Derived, ADDRESS),
        (AsyncOpenAI, {**ADDRESS, "base_url": "https://server/v1"}),
        (AsyncOpenAI, {**ADDRESS, "api_key": _key}),
        (AsyncOpenAI, {**ADDRESS, "base_url": "http://user:word@server/v1"}),
        (AsyncOpenAI, {**ADDRESS, "base_url": "http://server/v1?a=b"}),
        (AsyncOpenAI, {**ADDRESS, "default_query": {"a": "b"}}),
        (AsyncOpenAI, {**ADDRESS, "http_client": httpx.AsyncClient()}),
        (AsyncOpenAI, {**ADDRESS, "http_client": openai.DefaultAsyncHttpxClient()}),
        (AsyncAzureOpenAI, {**ADDRESS, "api_version": "1"}),
    ],
    ids=[
        "derived",
        "encrypted",
        "fresh keys",
        "user",
        "address with query",
        "query",
        "httpx",
        "own HTTP client",
        "Azure",
    ],
)
def test_a_client_with_more_than_an_address_and_a_key_sends_all_itself(
    make: Any, settings: dict[str, Any]
) -> None:
    async def kind() -> type:
        return type(connection_of(make(**settings)))

    assert asyncio.run(kind()) is ClientConnection


def kind_of(client: AsyncOpenAI) -> type:
    async def kind() -> type:
        return type(connection_of(client))

    return asyncio.run(kind())


def test_a_client_with_fresh_keys_that_has_had_one_sends_all_itself(stub: Stub) -> None:
    async def use(client: AsyncOpenAI) -> type:
        await client.chat.completions.create(model="m", messages=[])
        return type(connection_of(client))

    async def run() -> type:
        return await use(AsyncOpenAI(base_url=stub.url, api_key=_key))

    assert asyncio.run(run()) is ClientConnection


async def traced(*_: Any, **__: Any) -> None:
    """As packages that trace requests put it in the place of a client's own."""


class Wrapper:
    """Stands in for a function or method and has all that it has, as the package wrapt does it."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __get__(self, instance: Any, owner: type) -> Wrapper:
        return Wrapper(self._wrapped.__get__(instance, owner))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def test_a_client_of_a_patched_class_sends_all_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of(AsyncOpenAI(**ADDRESS)) is PlainConnection
    for patch in (traced, Wrapper(AsyncCompletions.create)):
        monkeypatch.setattr(AsyncCompletions, "create", patch)
        assert kind_of(AsyncOpenAI(**ADDRESS)) is ClientConnection


def test_a_client_that_is_patched_itself_sends_all_itself() -> None:
    client = AsyncOpenAI(**ADDRESS)
    client.chat.completions.create = traced  # type: ignore[assignment, method-assign]
    assert kind_of(client) is ClientConnection


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_a_client_behind_a_proxy_sends_all_itself(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://proxy:1")
    monkeypatch.delenv("no_proxy", raising=False)
    client = AsyncOpenAI(**ADDRESS)
    assert kind_of(client) is ClientConnection
    monkeypatch.delenv(variable)
    assert kind_of(client) is ClientConnection, "it took what there was when it was made"
    assert kind_of(AsyncOpenAI(**ADDRESS)) is PlainConnection
