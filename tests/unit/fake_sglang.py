"""As much of an SGLang server as a profile talks to, with times that follow a formula."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from typing import Any, ClassVar

PASS_S, NEW_TOKEN_S, PAIR_S, LOAD_TOKEN_S = 0.01, 1e-4, 1e-7, 2e-5


def prefill_s(cached: int, new: int, loaded: int = 0) -> float:
    """What the fake says that a prefill took."""
    return PASS_S + new * (NEW_TOKEN_S + (cached + new / 2) * PAIR_S) + loaded * LOAD_TOKEN_S


@dataclass
class Entry:
    """What a namespace has cached: the longest prompt seen, of which a part is a document."""

    tokens: list[int]
    document_tokens: int
    tier: str = "device"


@dataclass
class FakeSGLang:
    """A server whose cache is a list of namespaces, the least recently used leaving first.

    Attributes:
        reuses: Whether it caches at all.
        evicts: Whether the device tier overflows.
        requests_of_others: Reported as running.
        forgets: Numbers of the `/generate` calls that find nothing cached.
    """

    page_size: int = 1
    prompt_tokens: int = 256
    device_tokens: int = 1024
    has_host_tier: bool = True
    reuses: bool = True
    evicts: bool = True
    requests_of_others: int = 0
    forgets: frozenset[int] = frozenset()
    load_token_s: float = LOAD_TOKEN_S
    api_key: str | None = None
    entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    prompts: list[tuple[int, int]] = field(default_factory=list)
    vocabulary: ClassVar[range] = range(100, 2000)

    def server_info(self) -> dict[str, Any]:
        return {
            "model_path": "models/Fake-1B",
            "device": "cpu",
            "version": "0.5.23",
            "attention_backend": "fake",
            "prefill_attention_backend": None,
            "page_size": self.page_size,
            "dtype": "auto",
            "quantization": None,
            "kv_cache_dtype": "auto",
            "tp_size": 1,
            "chunked_prefill_size": -1,
            "max_req_input_len": self.prompt_tokens + 1,
            "max_total_num_tokens": self.device_tokens,
            "enable_hierarchical_cache": self.has_host_tier,
        }

    def loads(self) -> dict[str, Any]:
        load = {"num_running_reqs": self.requests_of_others, "num_waiting_reqs": 0}
        return {"accelerator": None, "loads": [load]}

    def generate(self, body: dict[str, Any]) -> Any:
        prompts, namespace = body["input_ids"], body["extra_key"]
        if isinstance(prompts[0], list):
            return [
                self._prefill(prompt, f"{namespace}-{index}", 0)
                for index, prompt in enumerate(prompts)
            ]
        rag = body["sampling_params"].get("custom_params", {}).get("rag", {})
        document_tokens = rag["documents"][0]["end"] if rag else 0
        return self._prefill(prompts, namespace, document_tokens)

    def _prefill(self, tokens: list[int], namespace: str, document_tokens: int) -> dict[str, Any]:
        assert len(tokens) <= self.prompt_tokens
        assert set(tokens) <= set(self.vocabulary)
        entry = self.entries.pop(namespace, None)
        known = entry is not None and self.reuses and len(self.prompts) not in self.forgets
        pairs = zip(entry.tokens if known else [], tokens[:-1], strict=False)
        matched = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        cached = matched // self.page_size * self.page_size
        host = cached if entry is not None and entry.tier == "host" else 0
        self.prompts.append((cached, len(tokens) - cached))
        self.entries[namespace] = Entry(tokens, document_tokens)
        if self.evicts:
            self._evict()
        seconds = prefill_s(cached, len(tokens) - cached) + host * self.load_token_s
        meta: dict[str, Any] = {"e2e_latency": seconds, "cached_tokens": cached}
        if cached:
            meta["cached_tokens_details"] = {"device": cached - host, "host": host}
        return {"output_ids": [1], "meta_info": meta}

    def _evict(self) -> None:
        def used() -> int:
            return sum(len(e.tokens) for e in self.entries.values() if e.tier == "device")

        while used() > self.device_tokens:
            oldest = next(n for n, e in self.entries.items() if e.tier == "device")
            entry = self.entries[oldest]
            if entry.document_tokens and self.has_host_tier:
                entry.tier, entry.tokens = "host", entry.tokens[: entry.document_tokens]
            else:
                del self.entries[oldest]

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Listen on a free port until the block ends; yields the URL."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _handler(fake: FakeSGLang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            self._reply(json.loads(self.rfile.read(size)))

        def _reply(self, body: dict[str, Any]) -> None:
            if fake.api_key and self.headers["Authorization"] != f"Bearer {fake.api_key}":
                self.send_error(401)
                return
            match self.path.partition("?")[0]:
                case "/server_info":
                    answer: Any = fake.server_info()
                case "/v1/loads":
                    answer = fake.loads()
                case "/tokenize":
                    answer = {"tokens": list(fake.vocabulary)}
                case "/generate":
                    answer = fake.generate(body)
                case "/flush_cache":
                    fake.entries.clear()
                    answer = "Cache flushed."
                case _:
                    self.send_error(404)
                    return
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
