"""Bursts beyond what a server takes at once: right answers, in the order of reuse."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from e2e.cpu_server import Server, running_server
from e2e.exactness import Prompt, ask, ask_all, assert_intact, make_prompts, stats, stream
from e2e.tiny_model import make_tiny_llama
from e2e.waiting import slow_passes, until

pytestmark = pytest.mark.server

RUNNING = 4
CHUNK_TOKENS = 128


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
    flags += ["--max-total-tokens", "4096", "--hicache-ratio", "2", "--dtype", "float32"]
    flags += ["--max-running-requests", str(RUNNING), "--chunked-prefill-size", str(CHUNK_TOKENS)]
    with running_server(make_tiny_llama(tmp_path_factory.mktemp("model")), *flags) as running:
        yield running


def prompt(*documents: int, question: int = 0, tokens: int = 300) -> Prompt:
    """Documents by number, each of `tokens` of its own."""
    ids, spans = list(range(100, 130)), []
    for number in documents:
        spans.append((str(number), len(ids), len(ids) + tokens))
        ids += [1_000 + (number * 977 + position * 31) % 40_000 for position in range(tokens)]
    ids += [300 + question, 400, 500 + question]
    return Prompt(tuple(ids), tuple(spans))


def cold(server: Server, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """What each is answered when nothing is cached."""
    answers = []
    for each in prompts:
        server.flush_cache()
        answers.append(ask(server, each).tokens)
    server.flush_cache()
    return answers


def test_the_log_says_that_the_queue_is_reordered(server):
    (line,) = [line for line in server.log().splitlines() if "Waiting queue:" in line]
    assert "most reused by computed first, overtaken 32 times at most" in line


def test_a_burst_beyond_capacity_is_answered_right(server):
    prompts = make_prompts(40, page_size=16, chunk_tokens=CHUNK_TOKENS)
    expected = cold(server, prompts)
    before = stats(server)["queue"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        with all_running(server):
            asked = [pool.submit(ask, server, each) for each in prompts]
            wait_for_queue(server, len(prompts))
        answers = [each.result() for each in asked]
    assert [answer.tokens for answer in answers] == expected
    queue = assert_intact(server)["queue"]
    assert queue["order"] == "reuse"
    assert queue["passes"] > before["passes"]
    assert 0 < queue["most_overtakings"] <= queue["window"] == 32


@contextmanager
def all_running(server: Server) -> Iterator[None]:
    """While within, as many requests run as may; they end with it, or after 800 tokens."""

    def run(number: int, rid: str) -> None:
        events = stream(server, prompt(number, tokens=8).body(800, rid=rid))
        next(events)
        begun.release()
        for _ in events:
            pass

    # New ones each time: two seconds after a stream's end SGLang aborts once more what has its id.
    rids = [uuid.uuid4().hex for _ in range(RUNNING)]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(RUNNING) as pool:
        blockers = [pool.submit(run, number, rid) for number, rid in enumerate(rids, 90)]
        for _ in blockers:
            assert begun.acquire(timeout=60)
        with slow_passes(server):
            yield
        for rid in rids:
            server.post("/abort_request", {"rid": rid})
    for blocker in blockers:
        blocker.result()


def wait_for_queue(server: Server, length: int) -> None:
    until(lambda: server.get("/rag/pool")["waiting"] == length)


def test_the_warm_half_of_a_burst_is_served_before_the_cold_half(server):
    warm = [prompt(9, question=question) for question in range(RUNNING)]
    burst = [prompt(20 + number) for number in range(RUNNING)] + warm
    expected = cold(server, burst)
    ask(server, prompt(9, question=RUNNING))
    with ThreadPoolExecutor(len(burst)) as pool:
        with all_running(server):
            answers = []
            for index, each in enumerate(burst):
                answers.append(pool.submit(server.generate, **each.body()))
                wait_for_queue(server, index + 1)
        replies = [answer.result() for answer in answers]
    assert [tuple(reply["output_ids"]) for reply in replies] == expected
    # Of the server's clock: the threads here see their answers in any order.
    sent = [reply["meta_info"]["response_sent_to_client_ts"] for reply in replies]
    assert max(sent[RUNNING:]) < min(sent[:RUNNING])


@pytest.mark.parametrize("tokens", [60, 300], ids=["in one pass", "in chunks"])
def test_requests_that_share_a_cold_document_compute_it_once(server, tokens):
    burst = [prompt(40, question=question, tokens=tokens) for question in range(RUNNING)]
    expected = cold(server, burst)
    answers = ask_all(server, burst, concurrency=RUNNING)
    assert [answer.tokens for answer in answers] == expected
    _, _, document_end = burst[0].documents[0]
    hits = sorted(answer.device_hit for answer in answers)
    assert hits == [0, *[document_end] * (RUNNING - 1)]


def test_requests_that_share_a_cold_document_in_one_batch_compute_it_once(server):
    burst = [prompt(50, question=question, tokens=60) for question in range(2 * RUNNING)]
    expected = cold(server, burst)
    bodies = [each.body() for each in burst]
    with ThreadPoolExecutor(1) as pool:
        with all_running(server):
            answers = pool.submit(
                server.generate,
                input_ids=[body["input_ids"] for body in bodies],
                sampling_params=[body["sampling_params"] for body in bodies],
            )
            wait_for_queue(server, len(burst))
        replies = answers.result()
    assert [tuple(reply["output_ids"]) for reply in replies] == expected
    _, _, document_end = burst[0].documents[0]
    hits = sorted(reply["meta_info"]["cached_tokens"] for reply in replies)
    assert hits[1:] == [document_end] * (2 * RUNNING - 1)


def test_who_waits_for_a_document_gets_on_when_the_one_that_computes_it_is_aborted(server):
    burst = [prompt(60, question=question, tokens=3_600) for question in range(RUNNING)]
    expected = cold(server, burst)
    aborted = "f" * 32
    with ThreadPoolExecutor(RUNNING) as pool:
        with slow_passes(server):
            first = pool.submit(server.generate, **burst[0].body(rid=aborted))
            until(lambda: stats(server)["device"]["locked_tokens"] > 0)
            held = [pool.submit(ask, server, each) for each in burst[1:]]
            wait_for_queue(server, len(held))
            server.post("/abort_request", {"rid": aborted})
        assert [answer.result().tokens for answer in held] == expected[1:]
    assert first.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert_intact(server)
