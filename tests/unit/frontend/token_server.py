"""A small HTTP server that generates a text token by token, as SGLang streams it.

A byte of UTF-8 is a token, and what comes next is decided by how many tokens follow the prompt,
whichever request has generated them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up."""


def place(body: dict[str, Any]) -> dict[str, Any]:
    """A prompt in tokens, and its annotation in these."""
    text, rag = body["text"], body["rag"]
    documents = [
        {**each, **{name: len(text[: each[name]].encode()) for name in ("start", "end")}}
        for each in rag["documents"]
    ]
    return {
        "input_ids": list(text.encode()),
        "rag": {**rag, "documents": documents, "unit": "token"},
    }


class TokenServer:
    """What a test sets, and what has happened.

    Attributes:
        script: What the model says.
        generating: The requests that were to generate something.
        computing: Those that were not.
        statuses: Answers to the next requests; 200 is the ordinary one.
        stalls_after: Where generation stops until `go_on` is set, `stalled` saying so.
        tells_tokens: It has the route for the text of tokens.
        tells_places: It has the route for the tokens of documents.
        placed: What came there.
    """

    def __init__(self, script: str = "", port: int = 0) -> None:
        self.script = script
        self.generating: list[dict[str, Any]] = []
        self.computing: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.statuses: list[int] = []
        self.stalls_after: int | None = None
        self.tells_tokens = True
        self.tells_places = True
        self.placed: list[dict[str, Any]] = []
        self.stalled = threading.Event()
        self.go_on = threading.Event()
        self._prompt_tokens = 0
        self._server = _Server(("127.0.0.1", port), self._handler())
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                """Quiet."""

            def do_GET(self) -> None:
                self._send(server.statuses.pop(0) if server.statuses else 200, {"model_path": "m"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/abort_request":
                    server.aborted.append(body["rid"])
                    self._send(200, {})
                elif self.path == "/detokenize" and not server.tells_tokens:
                    self._send(404, {"error": "no route"})
                elif self.path == "/rag/place" and not server.tells_places:
                    self._send(404, {"detail": "Not Found"})
                elif self.path == "/rag/place":
                    server.placed.append(body)
                    self._send(200, place(body))
                elif self.path == "/detokenize":
                    self._send(200, {"text": bytes(body["tokens"]).decode(errors="replace")})
                elif server.statuses and (status := server.statuses.pop(0)) != 200:
                    self._send(status, {"error": {"message": f"status {status}"}})
                elif body.get("stream"):
                    self._stream(body)
                else:
                    *_, last = server.generate(body)
                    self._send(200, last)

            def _stream(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for event in server.generate(body):
                    self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")

            def _chunk(self, content: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

            def _send(self, status: int, value: Any) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a request; the last one is its whole answer."""
        params = body["sampling_params"]
        given = body.get("input_ids") or list(body["text"].encode())
        if "text" in body:
            self._prompt_tokens = len(given)
        most = params["max_new_tokens"]
        (self.generating if most else self.computing).append(body)
        stops = params.get("stop") or ()
        rest = self.script.encode()[len(given) - self._prompt_tokens :]
        for tokens in range(min(1, most), min(most, len(rest)) + 1):
            text = rest[:tokens].decode(errors="ignore")
            is_last = tokens == min(most, len(rest))
            reason: dict[str, Any] | None = {"type": "length", "length": most} if is_last else None
            for stop in [stops] if isinstance(stops, str) else stops:
                if stop in text:
                    text, reason = text[: text.index(stop)], {"type": "stop"}
            event: dict[str, Any] = {
                "text": text,
                "output_ids": list(rest[:tokens]),
                "meta_info": {
                    "finish_reason": reason,
                    "prompt_tokens": len(given),
                    "completion_tokens": tokens,
                },
            }
            if body.get("return_prompt_token_ids"):
                event["prompt_token_ids"] = given
            yield event
            if reason is not None:
                return
            if tokens == self.stalls_after:
                self.stalled.set()
                self.go_on.wait()
