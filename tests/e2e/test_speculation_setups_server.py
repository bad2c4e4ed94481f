"""Speculations with other flags: ranks, HTTP workers, pages, without overlap, mixed batches."""

from __future__ import annotations

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
    until,
    until_idle,
)
from e2e.tiny_model import make_tiny_llama

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
    with counting(server) as added:
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
        chunked = Answer(server, 2, tokens=3900, speculative=True)
        until(lambda: server.get("/rag/stats")["device"]["locked_tokens"] > 256)
        chunked.abort()
        Answer(server, 3, output_tokens=LONG, speculative=True).decoding().abort()
    assert (added["started"], added["cancelled"]) == (3, 3)
