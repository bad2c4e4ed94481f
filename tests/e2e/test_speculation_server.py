"""Speculative requests on a real server: refused, promoted, ended, cancelled, never leaked.

What a test needs to happen at a certain time is made to happen: rows are taken by requests that
decode for long, a prefill takes many chunks, and every wait is for a state the server reports.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from e2e.cpu_server import Server, running_server
from e2e.tiny_model import make_tiny_llama

pytestmark = pytest.mark.server

ROWS = 2
LIMIT = 2
FLAGS = ["--radix-cache-backend", "knowledge-tree", "--dtype", "float32"]
FLAGS += ["--max-total-tokens", "6144", "--chunked-prefill-size", "128"]
FLAGS += ["--max-running-requests", str(ROWS)]
LONG = 2000  # output tokens of a request that is aborted when it has served its purpose

_rids = (f"{number:032x}" for number in itertools.count(1))


def policy(**config: Any) -> list[str]:
    return ["--radix-eviction-policy-config", json.dumps(config)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    with running_server(model, *FLAGS, *policy(max_prefill_bs=LIMIT)) as running:
        yield running


@pytest.fixture(autouse=True)
def no_leak(server: Server) -> Iterator[None]:
    """Every test begins with an empty tree, and leaves no request and no slot behind."""
    until_idle(server)
    server.flush_cache()
    yield
    until_idle(server)
    server.flush_cache()
    device = server.get("/rag/stats")["device"]
    assert device["free_tokens"] == device["capacity_tokens"]


def until(condition: Callable[[], Any]) -> Any:
    """Wait until `condition` holds, and return what it returns."""
    deadline = time.monotonic() + 60
    while not (result := condition()):
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.002)
    return result


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
    ) -> None:
        self.rid = next(_rids)
        self.server = server
        self.events: list[dict[str, Any]] = []
        self.body = request(
            *documents,
            tokens=tokens,
            output_tokens=output_tokens,
            speculative=speculative,
            rid=self.rid,
            stream=True,
        )
        host, port = server.url.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=120)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/generate", json.dumps(self.body), headers)
        self._reply = self._connection.getresponse()
        with suppress(OSError, http.client.HTTPException, AttributeError, ValueError):
            for line in self._reply:
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

    def abort(self) -> dict[str, Any]:
        self.server.post("/abort_request", {"rid": self.rid})
        return self.end()

    def hang_up(self) -> None:
        self._connection.sock.shutdown(2)


def request(
    *documents: int,
    tokens: int = 40,
    output_tokens: int = 4,
    speculative: bool = False,
    **body: Any,
) -> dict[str, Any]:
    """A greedy request over `documents` of `tokens` tokens each, and a question of its own."""
    ids, spans = [7, 8, 9], []
    for document in documents:
        spans.append({"id": str(document), "start": len(ids), "end": len(ids) + tokens})
        ids += [1000 + (document * 7919 + position * 31) % 40000 for position in range(tokens)]
    ids += [500 + next(_questions), 11, 12]
    rag = {"documents": spans, "speculative": speculative}
    params = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": {**params, "custom_params": {"rag": rag}}, **body}


_questions = itertools.count()


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


# Admission


def test_a_speculation_is_refused_while_as_many_requests_wait_as_the_limit_says(server):
    with counting(server) as added, full_rows(server, waiting=LIMIT):
        assert pool(server) == {"waiting": LIMIT, "max_prefill_bs": LIMIT, "accepts": False}
        guess = Answer(server, 1, speculative=True)
        reason = guess.end()
        assert (reason["type"], reason["status_code"]) == ("abort", 503)
        assert reason["message"] == "speculation refused: 2 requests wait, the limit is 2"
        with pytest.raises(urllib.error.HTTPError) as error:
            server.generate(**request(1, speculative=True))
        assert error.value.code == 503
        assert "speculation refused" in error.value.read().decode()
        assert promote(server, guess) == ["unknown"]
    assert pool(server) == {"waiting": 0, "max_prefill_bs": LIMIT, "accepts": True}
    assert added == {"refused": 2, "requests": ROWS + LIMIT, "documents": ROWS + LIMIT}


def test_a_speculation_that_waits_is_promoted_counts_once_and_is_served(server):
    with counting(server) as added, full_rows(server, waiting=0):
        guess = Answer(server, 1, 2, speculative=True)
        until(lambda: pool(server)["waiting"] == 1)
        assert promote(server, guess) == ["running"]
        assert promote(server, guess) == ["running"]
    assert guess.end()["type"] == "length"
    assert promote(server, guess) == ["finished"]
    assert added == {"started": 1, "promoted": 1, "requests": ROWS + 1, "documents": ROWS + 2}


def test_a_speculation_that_decodes_counts_at_its_promotion(server):
    with counting(server) as added:
        guess = Answer(server, 1, 2, output_tokens=LONG, speculative=True).decoding()
        before = counts(server)
        assert promote(server, guess) == ["running"]
        after = counts(server)
        assert after["requests"] == before["requests"] + 1
        assert after["documents"] == before["documents"] + 2
        assert guess.abort()["type"] == "abort"
    assert added == {"started": 1, "promoted": 1, "requests": 1, "documents": 2}


def test_a_speculation_counts_after_its_end_from_the_tokens_it_used(server):
    assert cached(server, 1) == 3 - 3
    guess = Answer(server, 1, 2, speculative=True)
    assert guess.end()["type"] == "length"
    until_idle(server)
    before = server.get("/rag/stats")
    wasted = before["speculation"]["wasted_tokens"]
    with counting(server) as added:
        assert promote(server, guess) == ["finished"]
        assert promote(server, guess) == ["finished"]
    after = server.get("/rag/stats")
    computed = 40 + 3 + 4  # the second document, the question and the answer
    assert wasted - after["speculation"]["wasted_tokens"] == computed
    assert added == {"promoted": 1, "wasted_tokens": -computed, "requests": 1, "documents": 2}
    hits = [stats["requests"]["device_hit_tokens"] for stats in (before, after)]
    assert hits[1] - hits[0] == 43


def test_a_speculation_counts_after_its_nodes_have_left_the_tree(server):
    guess = Answer(server, 1, 2, speculative=True)
    guess.end()
    until_idle(server)
    server.flush_cache()
    with counting(server) as added:
        assert promote(server, guess) == ["finished"]
    assert (added["requests"], added["documents"]) == (1, 2)
    assert server.get("/rag/stats")["nodes"] == 0


def test_a_speculation_that_is_never_promoted_never_counts(server):
    with counting(server) as added:
        Answer(server, 1, speculative=True).end()
    assert added == {"started": 1, "wasted_tokens": 3 + 40 + 3 + 4}


# Stepping aside


def test_a_request_that_needs_a_row_ends_the_youngest_speculation(server):
    with counting(server) as added:
        guesses = []
        for document in range(ROWS):
            guess = Answer(server, document, output_tokens=LONG, speculative=True)
            guesses.append(guess.decoding())
        assert Answer(server, 9).end()["type"] == "length"
        reason = guesses[-1].end()
        assert reason["type"] == "abort"
        assert reason["message"].startswith("speculation ended")
        assert promote(server, *guesses) == ["running", "unknown"]
        for guess in guesses[:-1]:
            assert guess.abort()["type"] == "abort"
    assert (added["started"], added["ended"], added["promoted"]) == (ROWS, 1, 1)
    assert "cancelled" not in added
    assert cached(server, ROWS - 1) == 43


def test_a_promoted_speculation_is_never_ended(server):
    guesses = [
        Answer(server, document, output_tokens=LONG, speculative=True).decoding()
        for document in range(ROWS)
    ]
    assert promote(server, *guesses) == ["running"] * ROWS
    waits = Answer(server, 9)
    until(lambda: pool(server)["waiting"] == 1)
    passes = len(guesses[0].events)
    until(lambda: len(guesses[0].events) > passes + 20)
    assert not any(guess.events[-1]["meta_info"]["finish_reason"] for guess in guesses)
    for guess in guesses:
        guess.abort()
    assert waits.end()["type"] == "length"


def test_a_request_that_needs_tokens_ends_speculations(server):
    guess = Answer(server, 1, tokens=2400, output_tokens=1600, speculative=True).decoding()
    assert Answer(server, 9, tokens=3900).end()["type"] == "length"
    assert guess.end()["message"].startswith("speculation ended")


def test_a_request_ends_a_speculation_in_the_middle_of_its_prefill(server):
    with counting(server) as added:
        guess = Answer(server, 1, tokens=3900, speculative=True)
        until(lambda: server.get("/rag/stats")["device"]["locked_tokens"] > 256)
        assert Answer(server, 9).end()["type"] == "length"
        assert guess.end()["message"].startswith("speculation ended")
    assert added["ended"] == 1
    assert added["wasted_tokens"] < 3900
    # Every chunk that was computed stays, the last one too.
    assert cached(server, 1, tokens=3900) == added["wasted_tokens"]


def test_a_request_for_the_document_that_is_being_prefilled_ends_nothing(server):
    with counting(server) as added:
        guess = Answer(server, 1, tokens=3900, speculative=True)
        until(lambda: server.get("/rag/stats")["device"]["locked_tokens"] > 256)
        same = Answer(server, 1, tokens=3900)
        assert same.end()["type"] == guess.end()["type"] == "length"
    assert "ended" not in added
    assert same.events[-1]["meta_info"]["cached_tokens"] >= 3840


# Cancelling


def test_cancelled_while_it_waits(server):
    with counting(server) as added, full_rows(server, waiting=0):
        guess = Answer(server, 1, speculative=True)
        until(lambda: pool(server)["waiting"] == 1)
        assert guess.abort()["type"] == "abort"
        assert promote(server, guess) == ["unknown"]
    assert added == {"started": 1, "cancelled": 1, "requests": ROWS, "documents": ROWS}


def test_cancelled_between_two_chunks(server):
    with counting(server) as added:
        guess = Answer(server, 1, tokens=3900, speculative=True)
        until(lambda: server.get("/rag/stats")["device"]["locked_tokens"] > 256)
        assert guess.abort()["type"] == "abort"
        assert promote(server, guess) == ["unknown"]
    assert (added["started"], added["cancelled"]) == (1, 1)
    assert cached(server, 1, tokens=3900) == added["wasted_tokens"]


def test_cancelled_as_soon_as_it_is_sent(server):
    # Wherever it is then: being tokenized, waiting, in its only prefill, decoding.
    with counting(server) as added:
        for attempt in range(20):
            guess = Answer(server, attempt, speculative=True, output_tokens=LONG)
            time.sleep(attempt / 1000)
            until(lambda g=guess: server.post("/abort_request", {"rid": g.rid}) or not g.is_alive())
    assert added["started"] == added["cancelled"] == 20


def test_cancelled_while_it_decodes(server):
    with counting(server) as added:
        guess = Answer(server, 1, output_tokens=LONG, speculative=True).decoding()
        assert guess.abort()["type"] == "abort"
        assert promote(server, guess) == ["unknown"]
    assert (added["started"], added["cancelled"]) == (1, 1)
    assert added["wasted_tokens"] > 46
    assert cached(server, 1) == 43


def test_cancelled_after_its_end(server):
    guess = Answer(server, 1, speculative=True)
    guess.end()
    server.post("/abort_request", {"rid": guess.rid})
    assert promote(server, guess) == ["finished"]


def test_a_client_that_is_gone_has_cancelled(server):
    with counting(server) as added:
        guess = Answer(server, 1, output_tokens=LONG, speculative=True).decoding()
        guess.hang_up()
        until(lambda: counts(server)["cancelled"] > 0)
    assert (added["started"], added["cancelled"]) == (1, 1)


# Routes


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "isn't JSON"),
        (b"[]", '"rids" alone'),
        (b'{"rids": [], "rid": 1}', '"rids" alone'),
        (b'{"rids": "a"}', "array of strings"),
        (b'{"rids": [1]}', "array of strings"),
        (b'{"rids": [""]}', "array of strings"),
        (json.dumps({"rids": ["x"] * 1025}).encode(), "at most 1024"),
    ],
)
def test_a_malformed_promotion_is_refused(server, body, named):
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("POST", "/rag/promote", body)
    reply = connection.getresponse()
    assert reply.status == 400
    assert named in json.loads(reply.read())["error"]["message"]


def test_ids_that_nobody_knows_are_unknown(server):
    ordinary = Answer(server, 1, output_tokens=LONG).decoding()
    reply = server.post("/rag/promote", {"rids": ["nobody", ordinary.rid]})
    assert reply == {"rids": {"nobody": "unknown", ordinary.rid: "unknown"}}
    ordinary.abort()
    assert server.post("/rag/promote", {"rids": []}) == {"rids": {}}
