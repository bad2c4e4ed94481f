"""Speculative and other requests to a real server, each on a thread of its own, and what the
server says of them.

Nothing here depends on how fast a server is: rows are taken by requests that decode for long, and
every wait is for a state that the server reports.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from e2e.cpu_server import Server
from e2e.waiting import until

ROWS = 2
LIMIT = 2
QUEUED = 3
FLAGS = ["--radix-cache-backend", "knowledge-tree", "--dtype", "float32"]
FLAGS += ["--max-total-tokens", "6144", "--chunked-prefill-size", "128"]
FLAGS += ["--max-running-requests", str(ROWS), "--max-queued-requests", str(QUEUED)]
LONG = 2000  # output tokens of a request that is aborted when it has served its purpose

_rids = (f"{number:032x}" for number in itertools.count(1))
_questions = itertools.count()


def policy(**config: Any) -> list[str]:
    return ["--radix-eviction-policy-config", json.dumps(config)]


def until_idle(server: Server) -> dict[str, Any]:
    def report() -> Any:
        stats = server.get("/rag/stats")
        idle = stats["speculation"]["in_flight"] == stats["device"]["locked_tokens"] == 0
        return idle and pool(server)["waiting"] == 0 and stats

    return until(report)


def pool(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = server.get("/rag/pool")
    return answer


def counts(server: Server) -> dict[str, int]:
    stats = server.get("/rag/stats")
    names = ("started", "refused", "ended", "promoted", "cancelled", "wasted_tokens")
    taken = {name: stats["speculation"][name] for name in names}
    return taken | {name: stats["requests"][name] for name in ("requests", "documents")}


@contextmanager
def counting(server: Server) -> Iterator[dict[str, int]]:
    """After the block, what it has added to the counts; what isn't in it was 0."""
    before, added = counts(server), {}
    yield added
    until_idle(server)
    after = counts(server)
    added |= {name: after[name] - before[name] for name in after if after[name] != before[name]}


class Answer:
    """A streaming request on a thread of its own.

    Attributes:
        rid: Its id.
        events: Events so far.
    """

    def __init__(
        self,
        server: Server,
        *documents: int,
        tokens: int = 40,
        output_tokens: int = 4,
        speculative: bool = False,
        question: int | None = None,
    ) -> None:
        self.rid = next(_rids)
        self.server = server
        self.events: list[dict[str, Any]] = []
        self.body = request(
            *documents,
            tokens=tokens,
            output_tokens=output_tokens,
            speculative=speculative,
            question=question,
            rid=self.rid,
            stream=True,
        )
        host, port = server.url.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=120)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        headers = {"Content-Type": "application/json"}
        # Another thread may hang up.
        with suppress(OSError, http.client.HTTPException, AttributeError, ValueError):
            self._connection.request("POST", "/generate", json.dumps(self.body), headers)
            for line in self._connection.getresponse():
                event = line.decode().removeprefix("data: ").strip()
                if event and event != "[DONE]":
                    self.events.append(json.loads(event))

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def decoding(self) -> Answer:
        until(lambda: self.events)
        return self

    def end(self) -> dict[str, Any]:
        """The last event's finish reason."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        reason: dict[str, Any] = self.events[-1]["meta_info"]["finish_reason"]
        return reason

    def cancel(self) -> None:
        self.server.post("/abort_request", {"rid": self.rid})

    def abort(self) -> dict[str, Any]:
        self.cancel()
        return self.end()

    def hang_up(self) -> None:
        until(lambda: self._connection.sock)
        self._connection.sock.shutdown(2)


def request(
    *documents: int,
    tokens: int = 40,
    output_tokens: int = 4,
    speculative: bool = False,
    question: int | None = None,
    **body: Any,
) -> dict[str, Any]:
    """A greedy request over `documents` of `tokens` tokens each, and a question, by default one
    that nobody has asked before."""
    ids, spans = [7, 8, 9], []
    for document in documents:
        spans.append({"id": str(document), "start": len(ids), "end": len(ids) + tokens})
        ids += [1000 + (document * 7919 + position * 31) % 40000 for position in range(tokens)]
    ids += [500 + (next(_questions) if question is None else question), 11, 12]
    rag = {"documents": spans, "speculative": speculative}
    params = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": {**params, "custom_params": {"rag": rag}}, **body}


def promote(server: Server, *answers: Answer) -> list[str]:
    reply = server.post("/rag/promote", {"rids": [answer.rid for answer in answers]})
    return [reply["rids"][answer.rid] for answer in answers]


def cached(server: Server, *documents: int, tokens: int = 40) -> int:
    """How many tokens of documents an ordinary request finds."""
    reply = server.generate(**request(*documents, tokens=tokens, output_tokens=1))
    found: int = reply["meta_info"]["cached_tokens"]
    return found


@contextmanager
def full_rows(server: Server, waiting: int) -> Iterator[list[Answer]]:
    """All rows decode ordinary requests, and so many more of them wait."""
    running = [Answer(server, 90 + row, output_tokens=LONG).decoding() for row in range(ROWS)]
    queue = [Answer(server, 95 + place) for place in range(waiting)]
    until(lambda: pool(server)["waiting"] == waiting)
    try:
        yield queue
    finally:
        for answer in running:
            answer.abort()
    assert [answer.end()["type"] for answer in queue] == ["length"] * waiting
