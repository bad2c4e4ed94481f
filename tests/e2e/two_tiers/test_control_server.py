"""Operators' calls on a real server, idle and under load."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from e2e.cpu_server import Server, running_server
from e2e.exactness import MODEL, Prompt, ask, assert_intact, make_prompts, stats
from e2e.tiny_model import make_tiny_llama
from e2e.waiting import slow_passes, until

from rag_radix.control.metrics import METRICS

pytestmark = pytest.mark.server

FLAGS = ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
FLAGS += ["--max-total-tokens", "2048", "--hicache-ratio", "4", "--dtype", "float32"]
FLAGS += ["--context-length", "1024"]
KEYS = ["--api-key", "user", "--admin-api-key", "admin"]


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return make_prompts(16, page_size=16, chunk_tokens=128)


def listed(server: Server, query: str = "limit=1000") -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in server.get(f"/rag/documents?{query}")["documents"]}


def status(server: Server, path: str, body: Any = None, key: str | None = None) -> int:
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(server.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_documents_of_requests_are_listed_with_what_became_of_them(server, prompts):
    server.flush_cache()
    asked = {name for prompt in prompts for name, _, _ in prompt.documents}
    for prompt in prompts:
        ask(server, prompt)
    report = stats(server)
    rows = listed(server)
    assert set(rows) <= asked
    on_device = {name for name, row in rows.items() if row["device_tokens"]}
    assert len(on_device) >= report["device"]["documents"] > 0
    assert sum(row["device_hits"] + row["host_hits"] for row in rows.values()) > 0
    assert {row["tier"] for row in rows.values()} <= {"device", "host"}
    assert sum(row["host_tokens"] for row in rows.values()) > 0
    by_frequency = server.get("/rag/documents?limit=3")["documents"]
    assert [row["frequency"] for row in by_frequency] == sorted(
        (row["frequency"] for row in rows.values()), reverse=True
    )[:3]
    view = server.get("/rag/tree?depth=64&nodes=1000")
    assert view["nodes"] == report["nodes"]
    assert server.get("/rag/tree?depth=1")["nodes"] <= 2


def test_an_invalidated_document_is_computed_anew(server, prompts):
    server.flush_cache()
    cold = ask(server, prompts[0])
    assert ask(server, prompts[0]).device_hit > len(prompts[0].tokens) // 2
    first, start, _ = prompts[0].documents[0]
    removed = server.post("/rag/invalidate", {"id": first})
    assert removed["places"] == 1
    assert removed["paths"] == [[first]]
    assert removed["in_use"]["nodes"] == removed["requests"] == 0
    assert listed(server) == {}
    again = ask(server, prompts[0])
    assert again.tokens == cold.tokens
    assert again.device_hit + again.host_hit <= start
    assert status(server, "/rag/invalidate", {"id": "nobody"}) == 404
    assert status(server, "/rag/invalidate", {"id": first, "version": "9"}) == 404
    assert status(server, "/rag/invalidate", {"id": ""}) == 400
    assert '"action": "invalidate"' in server.log()
    server.post("/rag/invalidate", {"all": True})
    report = assert_intact(server)
    assert report["nodes"] == 0
    assert report["device"]["cached_tokens"] == report["host"]["cached_tokens"] == 0


def test_a_request_that_is_computing_ends_with_its_answer_and_leaves_nothing(server, prompts):
    prompt = max(prompts, key=lambda prompt: len(prompt.tokens))
    server.post("/rag/invalidate", {"all": True})
    cold = ask(server, prompt)
    server.post("/rag/invalidate", {"all": True})
    name, marked = prompt.documents[0][0], 0
    with ThreadPoolExecutor(1) as pool, slow_passes(server):
        answer = pool.submit(ask, server, prompt)
        while not answer.done():
            with suppress(urllib.error.HTTPError):  # it isn't there yet, or not any more
                marked += server.post("/rag/invalidate", {"id": name})["requests"]
    assert answer.result().tokens == cold.tokens
    assert marked == 1
    assert listed(server) == {}
    assert assert_intact(server)["control"]["retired_nodes"] == 0


def test_a_command_says_what_it_has_removed(server, prompts):
    ask(server, prompts[0])
    command = [sys.executable, "-m", "rag_radix.cli", "invalidate", "--all", "--url", server.url]
    command[1:3] = ["-c", "import sys; from rag_radix.cli import main; sys.exit(main())"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "tokens on the device" in out
    assert listed(server) == {}


class Corpus:
    """Documents with a version that grows; each version begins like the one before."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._lock = threading.Lock()
        self.versions = {name: 0 for prompt in prompts for name, _, _ in prompt.documents}

    def update(self, name: str) -> None:
        with self._lock:
            self.versions[name] += 1

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request for `prompt` with its documents as they are now."""
        with self._lock:
            versions = dict(self.versions)
        body = prompt.body()
        tokens = list(prompt.tokens)
        for name, start, end in prompt.documents:
            for position in range((start + end) // 2, end):
                tokens[position] = 1000 + (tokens[position] + 7 * versions[name]) % 20_000
        body["input_ids"] = tokens
        for document in body["sampling_params"]["custom_params"]["rag"]["documents"]:
            document["version"] = str(versions[document["id"]])
        return body


def answer_under_updates(
    server: Server, prompts: list[Prompt], *, requests: int, invalidate: bool
) -> tuple[list[tuple[dict[str, Any], tuple[int, ...]]], list[float]]:
    """8 clients ask while documents change. Returns each request with its answer, and the share
    of prompt tokens that were cached, by tenth of the requests."""
    corpus, rng = Corpus(prompts), random.Random(3)
    order = [rng.choice(prompts) for _ in range(requests)]
    updates = {index: rng.choice(sorted(corpus.versions)) for index in range(5, requests, 9)}
    answers: list[Any] = [None] * requests

    def one(index: int) -> None:
        if (name := updates.get(index)) is not None:
            corpus.update(name)
            if invalidate:
                assert status(server, "/rag/invalidate", {"id": name}) in (200, 404)
        body = corpus.body(order[index])
        reply = server.generate(**body)
        cached = reply["meta_info"]["cached_tokens"] / len(body["input_ids"])
        answers[index] = body, tuple(reply["output_ids"]), cached

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(requests)))
    tenth = max(requests // 10, 1)
    rates = [
        sum(cached for _, _, cached in answers[i : i + tenth]) / len(answers[i : i + tenth])
        for i in range(0, requests, tenth)
    ]
    return [(body, tokens) for body, tokens, _ in answers], rates


def assert_like_cold_ones(server: Server, answers: list[Any], sample: int) -> None:
    for body, tokens in random.Random(1).sample(answers, sample):
        server.flush_cache()
        assert tuple(server.generate(**body)["output_ids"]) == tokens


def test_documents_that_change_under_load_never_give_a_stale_answer(server, prompts):
    server.flush_cache()
    answers, rates = answer_under_updates(server, prompts, requests=120, invalidate=True)
    report = assert_intact(server)
    print("hit rate by tenth:", " ".join(f"{rate:.2f}" for rate in rates))
    control = report["control"]
    assert control["retired_nodes"] == 0
    assert control["invalidated"]["nodes"] > 0
    assert sum(rates[1:]) / len(rates[1:]) > 0.3
    assert_like_cold_ones(server, answers, 25)


@pytest.mark.slow
def test_newer_versions_retire_older_ones_by_themselves(prompts):
    config = json.dumps({"retire_older_versions": True})
    flags = [*FLAGS, "--radix-eviction-policy-config", config, "--enable-metrics"]
    with running_server(MODEL, *flags) as server:
        answers, _ = answer_under_updates(server, prompts, requests=60, invalidate=False)
        report = assert_intact(server)
        assert report["control"]["retired_nodes"] == 0
        assert report["control"]["invalidated"]["nodes"] > 0
        rows = server.get("/rag/documents?limit=1000")["documents"]
        assert len({row["id"] for row in rows}) == len(rows)
        assert_like_cold_ones(server, answers, 8)
        # One more, after the second in which a counter's growth is written. Requests that are
        # outdated when they run aren't counted.
        counted = stats(server)["requests"]["requests"]
        time.sleep(1.1)
        ask(server, prompts[0])
        shown = server.get("/metrics")
        for metric in METRICS:
            assert re.search(rf"^{metric.series}{{.*dp_rank=\"0\"", shown, re.MULTILINE), metric
        assert 'rag_radix_tree_seconds_bucket{dp_rank="0",le="0.001",operation="publish"}' in shown
        (requests,) = re.findall(r"^rag_radix_requests_total{.*} (\S+)", shown, re.MULTILINE)
        assert counted <= float(requests) <= counted + 1


def test_a_pinned_document_stays_while_others_come_and_go(server, prompts):
    server.post("/rag/invalidate", {"all": True})
    ask(server, prompts[0])
    name, _, end = prompts[0].documents[-1]
    pinned = server.post("/rag/pin", {"id": name, "ttl_s": 600})
    assert pinned == {"places": 1}
    assert listed(server)[name]["pinned"]
    for _ in range(3):
        for prompt in prompts[1:]:
            ask(server, prompt)
    assert ask(server, prompts[0]).device_hit >= end
    (pin,) = server.get("/rag/pins")["pins"]
    assert (pin["id"], pin["tier"]) == (name, "device")
    assert 0 < pin["expires_in_s"] <= 600
    report = stats(server)
    assert report["device"]["locked_tokens"] == report["control"]["pins"]["device"]["pinned_tokens"]
    names = sorted({name for prompt in prompts for name, _, _ in prompt.documents})
    replies = [status(server, "/rag/pin", {"id": name}) for name in names]
    assert set(replies) <= {200, 404, 409}
    assert 409 in replies
    for pin in server.get("/rag/pins")["pins"]:
        assert server.post("/rag/unpin", {"id": pin["id"]}) == {"pins": 1}
    assert status(server, "/rag/unpin", {"id": name}) == 404
    assert status(server, "/rag/pin", {"id": "nobody"}) == 404
    server.post("/rag/pin", {"id": prompts[0].documents[0][0], "tier": "host", "ttl_s": 0.2})
    until(lambda: not server.get("/rag/pins")["pins"])
    assert_intact(server)


def test_documents_are_warmed_behind_all_traffic(server, prompts):
    server.post("/rag/invalidate", {"all": True})
    prompt = prompts[0]
    name, start, end = prompt.documents[0]
    content = list(prompt.tokens[start:end])
    order = {"prefix": list(prompt.tokens[:start]), "documents": [{"id": name, "tokens": content}]}
    before = stats(server)["requests"]
    assert server.post("/rag/warm", order)["state"] == "running"
    progress = warmed(server)
    assert (progress["warmed"], progress["failed"]) == (1, 0)
    assert stats(server)["requests"] == before  # it is no retrieval
    assert ask(server, prompt).device_hit >= end
    documents = [{"id": f"text {n}", "text": f"Passage {n}: " + "a word " * 60} for n in range(20)]
    documents.append({"id": "long", "text": "a word " * 3000})
    order = {"prefix": "Answer.", "documents": documents, "tokens_per_s": 1e6}
    server.post("/rag/warm", order)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: ask(server, prompt), prompts * 2))
    progress = warmed(server)
    assert (progress["warmed"], progress["failed"]) == (20, 1)
    assert "'long'" in progress["problem"]
    # Not which: requests that came after a document may have displaced it.
    assert any(name.startswith("text ") for name in listed(server))
    assert_intact(server)


def warmed(server: Server) -> dict[str, Any]:
    """What `/rag/warm` says when the order is done."""
    until(lambda: server.get("/rag/warm")["state"] != "running")
    progress: dict[str, Any] = server.get("/rag/warm")
    return progress


@pytest.mark.slow
def test_new_weights_empty_the_tree_and_operators_need_the_admin_key(prompts, tmp_path):
    other = make_tiny_llama(tmp_path / "other")
    with running_server(make_tiny_llama(tmp_path / "one"), *FLAGS, *KEYS) as server:
        assert status(server, "/rag/documents", key="user") == 401
        assert status(server, "/rag/documents", key="admin") == 200
        assert status(server, "/rag/invalidate", {"all": True}, key="user") == 401
        assert status(server, "/rag/invalidate", {"all": True}) == 401
        assert status(server, "/rag/stats", key="user") == 200
        for flush in (False, True):
            assert status(server, "/generate", prompts[0].body(), key="user") == 200
            body = {"model_path": str(other), "flush_cache": flush}
            assert status(server, "/update_weights_from_disk", body, key="admin") == 200
            request = urllib.request.Request(
                server.url + "/rag/stats", headers={"Authorization": "Bearer user"}
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                report = json.loads(reply.read())
            assert report["nodes"] == report["device"]["cached_tokens"] == 0
            assert report["integrity"] == "ok"


@pytest.mark.slow
def test_two_ranks_invalidate_alike(prompts, tmp_path):
    # Every call into the tree and into its control is compared between the ranks, and a
    # difference ends the server.
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    flags = [*FLAGS, "--tp-size", "2", "--page-size", "16", "--chunked-prefill-size", "128"]
    with running_server(make_tiny_llama(tmp_path), *flags, env=env) as server:
        answers, _ = answer_under_updates(server, prompts, requests=120, invalidate=True)
        report = assert_intact(server)
        assert report["control"]["invalidated"]["nodes"] > 0
        assert report["control"]["retired_nodes"] == 0
        assert_like_cold_ones(server, answers, 10)
        # Pins, too, and what they let go.
        for prompt in prompts:
            ask(server, prompt)
        for tier in ("device", "host"):
            for name in list(listed(server))[:3]:
                assert status(server, "/rag/pin", {"id": name, "tier": tier, "ttl_s": 1}) in (
                    200,
                    409,
                )
        for prompt in prompts:
            ask(server, prompt)
        until(lambda: not server.get("/rag/pins")["pins"])
        order = [{"id": f"warm {n}", "tokens": list(range(n, n + 50))} for n in range(5)]
        server.post("/rag/warm", {"prefix": [7] * 20, "documents": order})
        for prompt in prompts:
            ask(server, prompt)
        warmed(server)
        assert server.get("/rag/tree")["nodes"] > 0
        assert server.post("/rag/invalidate", {"prefix": "warm "})["places"] > 0
        assert server.post("/rag/invalidate", {"all": True})["freed"]["nodes"] > 0
        assert assert_intact(server)["nodes"] == 0
