"""How the requests that speculation adds to an OpenAI client's own reach its server.

OpenAI's client takes a millisecond of CPU time for a request, six times as much as a kept
connection does. So where nothing is lost by it, guesses and calls of the server's own routes take
such connections, and only the guess that is the answer is made what the client would have returned.
Any other client makes all requests itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

import orjson
from pydantic import BaseModel

from rag_radix_frontend.connections import Connections
from rag_radix_frontend.errors import RequestError
from rag_radix_frontend.replies import checked, events, message
from rag_radix_frontend.speculation import computed_tokens
from rag_radix_frontend.workers import WORKERS

_TIMEOUT_S = 60.0
_RETRY_S = 0.1
_CLOSED = "the event loop of the client is closed"

# What `create` doesn't put into the body of a request.
_BESIDE_THE_BODY = ("extra_headers", "extra_query", "timeout")


class ChatConnection(Protocol):
    """Reaches a server."""

    def call(self, route: str, body: Any = None) -> Any:
        """The JSON in the reply to a POST of `body`, or to a GET where there is none. Blocks; is
        called on threads."""
        ...

    def answers(self, options: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """A completion, or the chunks of its stream; sent once. Raises what the client would in
        the middle of a stream. If it is closed before its end, the server lets go of it."""
        ...

    def typed(self, answer: Any, *, is_chunk: bool) -> Any:
        """One of them, as the client returns it."""
        ...


def connection_of(client: Any) -> ChatConnection:
    """How to reach the server of a client of the running event loop; its address may end with
    `/v1`."""
    return PlainConnection(client) if _is_plain(client) else ClientConnection(client)


class ClientConnection:
    """By way of the client."""

    def __init__(self, client: Any) -> None:
        # What is kept for a client doesn't keep it.
        self._original = weakref.ref(client)
        self._copy_from(client)
        self._root = _root(client)
        self._loop = asyncio.get_running_loop()

    def call(self, route: str, body: Any = None) -> Any:
        if self._loop.is_closed():
            raise RequestError(_CLOSED)
        asking = self._ask(self._root + route, body)
        asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
        until_s = time.monotonic() + _TIMEOUT_S
        while not asked.done() and time.monotonic() < until_s:
            if self._loop.is_closed():  # It has forgotten what it hadn't begun.
                with contextlib.suppress(RuntimeError):
                    asking.close()
                raise RequestError(_CLOSED)
            concurrent.futures.wait([asked], _RETRY_S)
        try:
            return asked.result(0)
        except Exception as error:
            raise RequestError(str(error), getattr(error, "status_code", None)) from error

    async def _ask(self, url: str, body: Any) -> Any:
        client = self._client()
        if body is None:
            return await client.get(url, cast_to=object)
        return await client.post(url, body=body, cast_to=object)

    async def answers(self, options: dict[str, Any]) -> AsyncGenerator[Any, None]:
        reply = await self._client().chat.completions.create(**options)
        if not options.get("stream"):
            yield reply
            return
        async with reply:
            async for chunk in reply:
                yield chunk

    def typed(self, answer: Any, *, is_chunk: bool) -> Any:
        return answer

    def _client(self) -> Any:
        """The copy that asks, with the key that the client has now."""
        original = self._original()
        if original is not None and _key(original) != self._key:
            self._copy_from(original)
        return self._copy

    def _copy_from(self, client: Any) -> None:
        # A refused speculation isn't tried again by the client's own rule.
        self._copy, self._key = client.with_options(max_retries=0), _key(client)


class PlainConnection(ClientConnection):
    """By connections of its own, as OpenAI's client itself would without any settings."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._connections = Connections(self._root)
        self._completions = str(client.base_url).removeprefix(self._root) + "chat/completions"
        self._silence_s = getattr(client.timeout, "read", client.timeout)

    def call(self, route: str, body: Any = None) -> Any:
        reply = self._connections.request(
            route, body, timeout_s=_TIMEOUT_S, headers=self._headers()
        )
        text = checked(reply).text
        return orjson.loads(text) if text else None

    async def answers(self, options: dict[str, Any]) -> AsyncGenerator[Any, None]:
        if (body := _body(options)) is None:
            async with contextlib.aclosing(super().answers(options)) as by_client:
                async for answer in by_client:
                    yield answer
            return
        answers: asyncio.Queue[Any] = asyncio.Queue()
        ended = threading.Event()

        def put(answer: Any) -> None:
            if isinstance(answer, _End):
                ended.set()
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(answers.put_nowait, answer)

        WORKERS.start(partial(self._read, body, put))
        try:
            while not isinstance(answer := await answers.get(), _End):
                yield answer
        finally:
            # The loop ends, perhaps, and nothing but a thread goes on.
            if not ended.is_set():
                WORKERS.start(partial(self._abort, body["rid"], ended))
        if answer.error is not None:
            raise self._as_the_client(answer.error) from answer.error

    def _read(self, body: dict[str, Any], put: Callable[[Any], None]) -> None:
        try:
            reply = self._connections.request(
                self._completions,
                body,
                stream=body.get("stream", False),
                timeout_s=self._silence_s,
                once=True,
                headers=self._headers(),
            )
            if not body.get("stream"):
                put(checked(reply).json())
            else:
                with contextlib.closing(checked(reply)):
                    for event in events(reply):
                        if "error" in event:
                            raise RequestError(message(event))
                        put(event)
            put(_End(None))
        except Exception as error:
            put(_End(error))

    def _headers(self) -> dict[str, str]:
        headers = self._client().default_headers
        return {name: each for name, each in headers.items() if isinstance(each, str)}

    def _abort(self, rid: str, ended: threading.Event) -> None:
        """Have the server end a request that it may not know yet."""
        while not ended.is_set():
            with contextlib.suppress(Exception):
                self.call("/abort_request", {"rid": rid})
            ended.wait(_RETRY_S)

    def _as_the_client(self, error: Exception) -> Exception:
        import httpx
        import openai

        request = httpx.Request("POST", self._root + self._completions)
        if isinstance(error, TimeoutError):
            return openai.APITimeoutError(request)
        if isinstance(error, OSError):
            return openai.APIConnectionError(message=str(error), request=request)
        return openai.APIError(str(error), request, body=None)

    def typed(self, answer: Any, *, is_chunk: bool) -> Any:
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        if not isinstance(answer, dict):
            return answer
        typed = (ChatCompletionChunk if is_chunk else ChatCompletion).construct(**answer)
        if not is_chunk:
            typed._request_id = None
        return typed


class _End:
    """Of the answers; with what has ended them, if it was an error."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


def computed_tokens_of(answer: Any) -> int:
    """Tokens the server computed for a completion, or for a stream that ends with this chunk; 0
    where it doesn't say, as without `--enable-cache-report` what was cached."""
    usage = answer.get("usage") if isinstance(answer, dict) else getattr(answer, "usage", None)
    if isinstance(usage, BaseModel):
        usage = usage.model_dump()
    details = usage.get("prompt_tokens_details") if usage else None
    return computed_tokens({**usage, **details}) if usage and details else 0


def _key(client: Any) -> Any:
    return getattr(client, "api_key", None)


def _root(client: Any) -> str:
    return str(client.base_url).rstrip("/").removesuffix("/v1")


def _is_plain(client: Any) -> bool:
    """Whether nothing but the address, the key and the headers of a client matters: it is OpenAI's
    own, neither derived nor patched, has the HTTP client that it makes itself, and asks a server
    without encryption or a proxy."""
    openai = sys.modules.get("openai")
    if openai is None or type(client) is not openai.AsyncOpenAI:
        return False
    url, http_client = client.base_url, client._client
    return (
        url.scheme == "http"
        and not (url.userinfo or url.query or client.default_query)
        and bool(client.api_key)
        and getattr(client, "_api_key_provider", None) is None
        and type(http_client).__name__ == "AsyncHttpxClientWrapper"
        and http_client._transport_for_url(url) is http_client._transport
        and not Connections(_root(client)).is_proxied
        and _is_openais(client.chat.completions.create)
    )


def _is_openais(method: Any) -> bool:
    """Whether a method is as OpenAI wrote it. What stands in for one may look like it."""
    if type(method) is not MethodType or type(method.__func__) is not FunctionType:
        return False
    return str(method.__func__.__globals__["__name__"]).startswith("openai.")


def _body(options: dict[str, Any]) -> dict[str, Any] | None:
    """The body of a completion's request; None where only the client knows what it is to be."""
    body = {name: value for name, value in options.items() if name != "extra_body"}
    body |= options["extra_body"]
    if any(name in body for name in _BESIDE_THE_BODY):
        return None
    try:
        orjson.dumps(body)
    except TypeError:  # OpenAI's own values, such as NOT_GIVEN
        return None
    return body
