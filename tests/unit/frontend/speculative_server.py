"""A small HTTP server with the routes for speculations, whose every decision a test can take.

It speaks as much of SGLang's HTTP API as its frontend language uses. An answer depends on nothing
but the prompt; every character of it is a token.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rag_radix_frontend import Document, ScoredDocument, Stage
from rag_radix_frontend.workers import Workers

WAIT_S = 30.0


def eventually(condition: Callable[[], object], what: str = "") -> None:
    """Wait until something holds, which it must."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what or "it never happened"
        time.sleep(0.002)


@contextmanager
def no_more_threads() -> Iterator[None]:
    """There are as many threads as there may be."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(Workers, "start", refuse)
        yield


@dataclass(eq=False)
class Request:
    """What was asked, and how it goes on: held until `go`, ended once `end` has a message."""

    body: dict[str, Any]
    rids: list[str]
    speculative: bool
    go: threading.Event = field(default_factory=threading.Event)
    end: str | None = None
    finished: bool = False
    promoted: bool = False

    @property
    def prompt(self) -> Any:
        return self.body.get("text", self.body.get("input_ids"))

    def stop(self, message: str) -> None:
        self.end = message
        self.go.set()


class _Server(ThreadingHTTPServer):
    # Whole batches of programs connect at once.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients of cancelled programs hang up."""


class SpeculativeServer:
    """What a test sets:

    - `hold`: which requests wait for their `go`, or for `hold_after` characters of a stream.
    - `waiting`, `max_prefill_bs`: what `/rag/pool` says; speculations are refused accordingly.
    - `promote`: what `/rag/promote` says of a request instead of its state.
    - `promoting`: cleared, `/rag/promote` doesn't answer until it is set.
    - `missing`: routes that the server doesn't have.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.pool_asked = 0
        self.promotions: list[list[str]] = []
        self.hold: Callable[[Request], bool] = lambda request: False
        self.hold_after = 0
        self.waiting = 0
        self.max_prefill_bs = 4
        self.promote: Callable[[Request | None], str] | None = None
        self.promoting = threading.Event()
        self.promoting.set()
        self.missing: tuple[str, ...] = ()
        self._promotion = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def pool(self) -> dict[str, int | bool]:
        """What `/rag/pool` says."""
        return {
            "waiting": self.waiting,
            "max_prefill_bs": self.max_prefill_bs,
            "accepts": self.waiting < self.max_prefill_bs,
        }

    @property
    def speculations(self) -> list[Request]:
        return [request for request in self.requests if request.speculative]

    @property
    def ordinary(self) -> list[Request]:
        return [request for request in self.requests if not request.speculative]

    def of(self, rid: str) -> Request | None:
        return next((r for r in list(self.requests) if rid in r.rids), None)

    def end_guess(self, request: Request) -> None:
        """End a speculation in favour of others, unless it was promoted."""
        with self._promotion:
            if not request.promoted:
                request.stop("speculation ended: others wait")

    def close(self) -> None:
        self.promoting.set()
        for request in self.requests:
            request.stop("closed")
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Quiet."""

            def do_GET(self) -> None:
                server.pool_asked += self.path == "/rag/pool"
                if self.path in server.missing:
                    self._send(404, {"error": {"message": "no route"}})
                elif self.path == "/get_model_info":
                    self._send(200, {"model_path": "stub"})
                else:
                    self._send(200, server.pool())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path in server.missing:
                    self._send(404, {"error": {"message": "no route"}})
                elif self.path == "/abort_request":
                    server.aborted.append(body["rid"])
                    if (request := server.of(body["rid"])) is not None:
                        request.stop("Aborted")
                    self._send(200, {})
                elif self.path == "/rag/promote":
                    server.promotions.append(body["rids"])
                    server.promoting.wait()
                    self._send(200, {"rids": {rid: self._promote(rid) for rid in body["rids"]}})
                else:
                    self._generate(body)

            def _promote(self, rid: str) -> str:
                request = server.of(rid)
                if server.promote is not None:
                    return server.promote(request)
                with server._promotion:
                    if request is None or request.end is not None:
                        return "unknown"
                    request.promoted = True
                    return "finished" if request.finished else "running"

            def _generate(self, body: dict[str, Any]) -> None:
                rid, params = body["rid"], body["sampling_params"]
                request = Request(
                    body,
                    rids=rid if isinstance(rid, list) else [rid],
                    speculative=any(
                        p.get("custom_params", {}).get("rag", {}).get("speculative", False)
                        for p in (params if isinstance(params, list) else [params])
                    ),
                )
                server.requests.append(request)
                if request.speculative and server.waiting >= server.max_prefill_bs:
                    message = "speculation refused: too many requests wait"
                    if not body.get("stream"):
                        self._send(503, {"object": "error", "message": message, "code": 503})
                        return
                    request.stop(message)
                elif not server.hold(request):
                    request.go.set()
                if body.get("stream"):
                    self._stream(request)
                    return
                request.go.wait()
                prompt = request.prompt
                if isinstance(prompt, list):
                    self._send(200, [server.answer(request, one) for one in prompt])
                elif (n := params.get("n", 1)) > 1:
                    self._send(200, [server.answer(request, prompt)] * n)
                else:
                    self._send(200, server.answer(request, prompt))

            def _stream(self, request: Request) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                whole = server.answer(request, request.prompt)["text"]
                for end in range(1, len(whole) + 1):
                    if end > server.hold_after:
                        request.go.wait()
                    if request.end is not None:
                        break
                    self._event(server.answer(request, request.prompt, tokens=end))
                if request.end is not None:
                    self._event(server.answer(request, request.prompt))
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")

            def _event(self, value: Any) -> None:
                self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

            def _chunk(self, content: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

            def _send(self, status: int, value: Any) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler

    def answer(self, request: Request, prompt: Any, tokens: int | None = None) -> dict[str, Any]:
        """The reply to a prompt, or what a stream shows of it after so many tokens."""
        params = request.body["sampling_params"]
        silent = isinstance(params, list) or params.get("max_new_tokens") == 0
        whole = "" if silent else f"[{len(prompt)}:{prompt[-3:]!r}]"
        text = "" if request.end is not None else whole[:tokens]
        reason: dict[str, Any] | None = None
        if request.end is not None:
            reason = {"type": "abort", "message": request.end}
        elif text == whole:
            reason = {"type": "stop"}
            request.finished = True
        return {
            "text": text,
            "meta_info": {
                "finish_reason": reason,
                "prompt_tokens": len(prompt),
                "cached_tokens": 2,
                "completion_tokens": max(1, len(text)),
                "input_token_logprobs": [[-1 / ord(str(c)[0]), 1, str(c)] for c in prompt[-4:]],
                "output_token_logprobs": [],
            },
        }


class Scripted:
    """A retriever that follows a script.

    A tuple of documents is a stage, the last one the final one; a function is called between the
    stages, on the thread of the state.
    """

    def __init__(self, *script: tuple[Document, ...] | Callable[[], object]) -> None:
        self._script = script

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        last = max(i for i, step in enumerate(self._script) if isinstance(step, tuple))
        for i, step in enumerate(self._script):
            if isinstance(step, tuple):
                found = tuple(ScoredDocument(d, 1 - r / 10) for r, d in enumerate(step))
                yield Stage(found, final=i == last)
            else:
                step()
