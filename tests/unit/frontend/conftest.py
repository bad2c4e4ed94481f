"""A real index of real documents, and a small HTTP server that records what it is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import orjson
import pytest
from rag_radix_frontend import (
    Document,
    FaissRetriever,
    RagEndpoint,
    ScoredDocument,
    Stage,
    build_index,
    workers,
)
from unit.frontend.speculative_server import SpeculativeServer, eventually


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 topics of the Python language reference, each cut to its first 800 characters."""
    path = tmp_path_factory.mktemp("corpus") / "topics.jsonl"
    with path.open("wb") as out:
        for name in sorted(topics)[:40]:
            line = {"id": f"topics/{name}", "text": topics[name][:800], "version": "1"}
            out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    return path


@pytest.fixture(scope="session", params=["flat", "ivf", "hnsw"])
def index_directory(
    request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The corpus indexed with the real MiniLM encoder, once for each kind of index."""
    out = tmp_path_factory.mktemp("index") / request.param
    build_index(corpus, out, "minilm", request.param)
    return out


@pytest.fixture(scope="session")
def minilm_retriever(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> FaissRetriever:
    out = tmp_path_factory.mktemp("index") / "shared"
    build_index(corpus, out)
    return FaissRetriever.open(out)


class Listed:
    """A retriever whose result for a query is written down."""

    def __init__(self, **results: list[Document]) -> None:
        self._results = results

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        found = self._results[query][:k]
        # A provisional stage first: what reaches a prompt must be the final one.
        yield Stage(tuple(ScoredDocument(d, 0.0) for d in reversed(found)), final=False)
        yield Stage(
            tuple(ScoredDocument(d, 1 - rank / 10) for rank, d in enumerate(found)), final=True
        )


CATS = Document("animals/cats", "Cats purr.", version="3")
DOGS = Document("animals/dogs", "Dogs bark.")
MOON = Document("space/moon", "The moon is round.")


@pytest.fixture
def listed() -> Listed:
    return Listed(animals=[CATS, DOGS], space=[MOON])


class StubServer:
    """Speaks as much of SGLang's HTTP API as its frontend language uses.

    Every character is a token, and an answer says how long its prompt was. Set `hold` to keep
    `/generate` from answering until the request is aborted.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.hold = False
        self.reply: Callable[[dict[str, Any]], tuple[int, Any]] | None = None
        self.arrived = threading.Event()
        self._released = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Quiet."""

            def do_GET(self) -> None:
                if self.path == "/get_model_info":
                    self._send(200, {"model_path": "stub"})
                else:
                    self._send(404, {"error": f"no route {self.path}"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/abort_request":
                    stub.aborted.append(body["rid"])
                    stub._released.set()
                    self._send(200, {})
                elif self.path == "/generate":
                    self._generate(body)
                else:
                    self._send(404, {"error": f"no route {self.path}"})

            def _generate(self, body: dict[str, Any]) -> None:
                stub.asked.append(body)
                stub.arrived.set()
                if stub.hold:
                    stub._released.wait()
                if stub.reply is not None:
                    self._send(*stub.reply(body))
                elif body.get("stream"):
                    self._stream(stub._answer(body["text"], body["sampling_params"]))
                elif isinstance(body.get("text"), list):
                    self._send(200, [stub._answer(t, {}) for t in body["text"]])
                elif (n := body["sampling_params"].get("n", 1)) > 1:
                    self._send(200, [stub._answer(body["text"], {})] * n)
                else:
                    self._send(200, stub._answer(body["text"], body["sampling_params"]))

            def _stream(self, answer: dict[str, Any]) -> None:
                self.send_response(200)
                self.end_headers()
                for end in range(1, len(answer["text"]) + 1):
                    event = {**answer, "text": answer["text"][:end]}
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")

            def _send(self, status: int, value: Any) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _answer(self, text: str, sampling_params: dict[str, Any]) -> dict[str, Any]:
        reason = {"type": "abort", "message": "Aborted"} if self.hold else {"type": "stop"}
        return {
            "text": "" if sampling_params.get("max_new_tokens") == 0 else f"[{len(text)}]",
            "meta_info": {
                "finish_reason": reason,
                "prompt_tokens": len(text),
                "input_token_logprobs": [[-1 / ord(c), ord(c), c] for c in text[-4:]],
                "output_token_logprobs": [],
            },
        }

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def stub() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.close()


@pytest.fixture
def server() -> Iterator[SpeculativeServer]:
    server = SpeculativeServer()
    yield server
    server.close()


@pytest.fixture
def backend(server: SpeculativeServer) -> RagEndpoint:
    return RagEndpoint(server.url, chat_template_name="chatml")


@pytest.fixture
def no_threads_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The threads of speculations end by themselves."""
    monkeypatch.setattr(workers, "_IDLE_S", 0.01)
    yield
    eventually(
        lambda: not {t.name for t in threading.enumerate()} & {"rag-worker", "rag-gate"},
        "a thread is left",
    )
