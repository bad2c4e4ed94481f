"""Speculations with other flags: ranks, HTTP workers, pages, without overlap, mixed batches."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.cpu_server import Server, running_server
from e2e.speculative import (
    FLAGS,
    LIMIT,
    LONG,
    ROWS,
    Answer,
    cached,
    counting,
    full_rows,
    policy,
    pool,
    promote,
    request,
    until_idle,
)
from e2e.tiny_model import make_tiny_llama
from e2e.waiting import slow_passes, until

pytestmark = [pytest.mark.server, pytest.mark.slow]

SETUPS: dict[str, list[str]] = {
    # Every call into the tree is compared between the ranks, and a difference ends the server.
    "two ranks": ["--tp-size", "2"],
    "two HTTP workers": ["--tokenizer-worker-num", "2"],
    "pages of 16": ["--page-size", "16", "--enable-hierarchical-cache", "--hicache-ratio", "2"],
    "no overlap": ["--disable-overlap-schedule"],
    "mixed batches": ["--enable-mixed-chunk"],
    "another policy": ["--schedule-policy", "lpm"],
}
RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}


@pytest.mark.parametrize("setup", SETUPS)
def test_speculations_are_refused_promoted_ended_and_cancelled(tmp_path: Path, setup: str) -> None:
    flags = [*FLAGS, *policy(max_prefill_bs=LIMIT), *SETUPS[setup]]
    env = RANKS if setup == "two ranks" else {}
    with running_server(make_tiny_llama(tmp_path), *flags, env=env) as server:
        for part in (refusal, promotion, rows, chunks, cancellation):
            part(server)
            stats = until_idle(server)
            assert stats["integrity"] == "ok"
            server.flush_cache()
            device = server.get("/rag/stats")["device"]
            assert device["free_tokens"] == device["capacity_tokens"], part


def refusal(server: Server) -> None:
    with counting(server) as added, full_rows(server, waiting=LIMIT):
        assert (
            Answer(server, 1, speculative=True).end()["message"].startswith("speculation refused")
        )
    assert added == {"refused": 1, "requests": ROWS + LIMIT, "documents": ROWS + LIMIT}


def promotion(server: Server) -> None:
    with counting(server) as added:
        with full_rows(server, waiting=0):
            waits = Answer(server, 1, speculative=True)
            until(lambda: pool(server)["waiting"] == 1)
            assert promote(server, waits) == ["running"]
        assert waits.end()["type"] == "length"
        decodes = Answer(server, 2, output_tokens=LONG, speculative=True).decoding()
        ended = Answer(server, 3, speculative=True)
        ended.end()
        assert promote(server, decodes, ended, waits) == ["running", "finished", "finished"]
        decodes.abort()
        Answer(server, 4, speculative=True).end()
    assert (added["started"], added["promoted"]) == (4, 3)
    assert added["requests"] == added["documents"] == ROWS + 3


def rows(server: Server) -> None:
    with counting(server) as added:
        guesses = []
        for document in range(ROWS):
            guess = Answer(server, document, output_tokens=LONG, speculative=True)
            guesses.append(guess.decoding())
        assert Answer(server, 9).end()["type"] == "length"
        assert guesses[-1].end()["message"].startswith("speculation ended")
        guesses[0].abort()
    assert (added["ended"], added["cancelled"]) == (1, 1)


def chunks(server: Server) -> None:
    with counting(server) as added, slow_passes(server):
        guess = Answer(server, 1, tokens=3900, speculative=True)
        until(lambda: server.get("/rag/stats")["device"]["locked_tokens"] > 256)
        assert Answer(server, 9).end()["type"] == "length"
        assert guess.end()["message"].startswith("speculation ended")
    assert 0 < cached(server, 1, tokens=3900) <= added["wasted_tokens"] < 3900


def cancellation(server: Server) -> None:
    with counting(server) as added:
        with full_rows(server, waiting=0):
            waits = Answer(server, 1, speculative=True)
            until(lambda: pool(server)["waiting"] == 1)
            waits.abort()
        with slow_passes(server):
            chunked = Answer(server, 2, tokens=3900, speculative=True)
            until(lambda: server.get("/rag/stats")["device"]["locked_tokens"] > 256)
            chunked.abort()
        Answer(server, 3, output_tokens=LONG, speculative=True).decoding().abort()
    assert (added["started"], added["cancelled"]) == (3, 3)


STORMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "two tiers": (["--enable-hierarchical-cache", "--hicache-ratio", "2"], {}),
    "retractions": (["--page-size", "16"], {"SGLANG_TEST_RETRACT": "1"}),
}


@pytest.mark.parametrize("storm", STORMS)
def test_a_storm_of_guesses_leaves_right_answers_and_no_trace(tmp_path: Path, storm: str) -> None:
    """Hundreds of requests, eight at a time, that are promoted, aborted and hung up on at any
    moment, in a device tier that holds few of their documents."""
    more, env = STORMS[storm]
    flags = [*FLAGS, *policy(max_prefill_bs=16), "--max-total-tokens", "2048"]
    flags += ["--max-running-requests", "6", "--max-queued-requests", "64", *more]
    with running_server(make_tiny_llama(tmp_path), *flags, env=env) as server:
        rng = random.Random(3)
        prompts = [tuple(rng.sample(range(10), rng.randint(1, 3))) for _ in range(40)]
        known = {documents: greedy(server, documents) for documents in prompts}
        asked = [rng.choice(prompts) for _ in range(300)]
        server.flush_cache()
        with counting(server) as added, ThreadPoolExecutor(8) as threads:
            kept = threads.map(lambda one: play(server, *one, known[one[1]]), enumerate(asked))
            promoted = sum(kept)
        assert added["promoted"] == promoted
        # How many of each kind there are depends on how fast the server is.
        assert min(promoted, added["started"], added["cancelled"], added["ended"]) > 0
        assert server.get("/rag/stats")["integrity"] == "ok"
        server.flush_cache()
        device = server.get("/rag/stats")["device"]
        assert device["free_tokens"] == device["capacity_tokens"]


def greedy(server: Server, documents: tuple[int, ...]) -> list[int]:
    tokens: list[int] = server.generate(**request(*documents, tokens=200, question=7))["output_ids"]
    return tokens


def play(server: Server, number: int, documents: tuple[int, ...], known: list[int]) -> bool:
    """One request and what its client does meanwhile; whether it was promoted."""
    rng = random.Random(number)
    long = rng.random() < 0.3
    answer = Answer(
        server,
        *documents,
        tokens=200,
        output_tokens=rng.randint(50, 300) if long else 4,
        speculative=rng.random() < 0.7,
        question=7,
    )
    promoted = False
    if rng.random() < 0.5:
        time.sleep(rng.choice([0, 0.01, 0.03, 0.1, 0.2]))
        promoted = promote(server, answer) != ["unknown"]
    if rng.random() < 0.4:
        time.sleep(rng.choice([0, 0.01, 0.03, 0.1, 0.2]))
        answer.cancel() if rng.random() < 0.8 else answer.hang_up()
        return promoted
    if answer.end()["type"] == "length":
        assert answer.events[-1]["output_ids"][:4] == known
    else:
        assert answer.end()["message"].startswith("speculation")
        assert answer.body["sampling_params"]["custom_params"]["rag"]["speculative"]
        assert not promoted
    return promoted
