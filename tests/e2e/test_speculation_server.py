"""Speculative requests on a real server: refused, promoted, ended, cancelled, never leaked."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cpu_server import Server, running_server
from e2e.speculative import (
    FLAGS,
    LIMIT,
    LONG,
    QUEUED,
    ROWS,
    Answer,
    cached,
    counting,
    counts,
    full_rows,
    policy,
    pool,
    promote,
    request,
    until_idle,
)
from e2e.tiny_model import make_tiny_llama
from e2e.waiting import slow_passes, until

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running_server(model, *FLAGS, *policy(max_prefill_bs=LIMIT)) as running:
        yield running


@pytest.fixture(autouse=True)
def no_leak(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test begins with an empty tree, and leaves no request and no slot behind."""
    if "server" not in request.fixturenames:
        yield
        return
    server: Server = request.getfixturevalue("server")
    until_idle(server)
    server.flush_cache()
    yield
    until_idle(server)
    server.flush_cache()
    device = server.get("/rag/stats")["device"]
    assert device["free_tokens"] == device["capacity_tokens"]


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


def test_a_speculation_is_served_after_all_that_wait(server):
    with full_rows(server, waiting=0):
        guess = Answer(server, 1, speculative=True)
        until(lambda: pool(server)["waiting"] == 1)
        others = [Answer(server, 2 + row, output_tokens=LONG) for row in range(ROWS)]
        until(lambda: pool(server)["waiting"] == 1 + ROWS)
    until(lambda: all(other.events for other in others))
    assert not guess.events
    assert [other.abort()["type"] for other in others] == ["abort"] * ROWS
    assert guess.end()["type"] == "length"


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


def test_with_a_limit_of_none_every_speculation_is_refused_and_the_rest_is_served(model):
    with running_server(model, *FLAGS, *policy(max_prefill_bs=0)) as server:
        assert pool(server) == {"waiting": 0, "max_prefill_bs": 0, "accepts": False}
        with counting(server) as added:
            for document in range(3):
                guess = Answer(server, document, speculative=True)
                assert guess.end()["message"].startswith("speculation refused: 0 requests wait")
                assert Answer(server, document).end()["type"] == "length"
        assert added == {"refused": 3, "requests": 3, "documents": 3}


def test_a_speculation_with_an_error_is_answered_with_the_error(server):
    with counting(server) as added:
        with pytest.raises(urllib.error.HTTPError) as error:
            server.generate(**request(1, tokens=4200, speculative=True))
        assert error.value.code == 400
    assert added == {}


def test_parallel_samples_are_no_speculations(server):
    body = request(1, speculative=True)
    body["sampling_params"]["n"] = 2
    with pytest.raises(urllib.error.HTTPError) as error:
        server.generate(**body)
    assert error.value.code == 400
    assert "rag.speculative: can't be combined with n=2" in error.value.read().decode()


def test_each_request_of_a_batch_is_promoted_by_its_own_id(server):
    bodies = [request(document, speculative=True) for document in range(2)]
    with counting(server) as added:
        server.generate(
            input_ids=[body["input_ids"] for body in bodies],
            sampling_params=[body["sampling_params"] for body in bodies],
            rid="batch",
        )
        reply = server.post("/rag/promote", {"rids": ["batch_0", "batch_1", "batch"]})
    assert reply["rids"] == {"batch_0": "finished", "batch_1": "finished", "batch": "unknown"}
    assert (added["promoted"], added["requests"]) == (2, 2)


def test_a_speculation_under_a_grammar_is_promoted(server):
    body = request(1, output_tokens=30, speculative=True, rid="f" * 32)
    body["sampling_params"] |= {"regex": "(yes|no), [a-z]{20}", "ignore_eos": False}
    with counting(server) as added:
        server.generate(**body)
        assert server.post("/rag/promote", {"rids": ["f" * 32]})["rids"] == {"f" * 32: "finished"}
    assert (added["started"], added["promoted"], added["requests"]) == (1, 1, 1)


# Stepping aside


def test_a_speculation_makes_place_in_a_queue_of_limited_length(server):
    with counting(server) as added, full_rows(server, waiting=0):
        guess = Answer(server, 1, speculative=True)
        until(lambda: pool(server)["waiting"] == 1)
        others = [Answer(server, 95 + place) for place in range(QUEUED)]
        assert guess.end()["message"].startswith("speculation ended")
        until(lambda: pool(server)["waiting"] == QUEUED)
        one_too_many = Answer(server, 8)
        assert one_too_many.end()["message"] == "The request queue is full."
    assert [other.end()["type"] for other in others] == ["length"] * QUEUED
    assert added == {"started": 1, "ended": 1, "requests": 5, "documents": 5}


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
    with counting(server) as added, slow_passes(server):
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
        with slow_passes(server):
            guess = Answer(server, 1, tokens=3900, speculative=True)
            until(lambda: server.get("/rag/stats")["device"]["locked_tokens"] > 256)
            same = Answer(server, 1, tokens=3900)
            until(lambda: pool(server)["waiting"] == 1)
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
    with counting(server) as added, slow_passes(server):
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


def test_cancelled_before_it_has_left_for_the_scheduler(server):
    with counting(server) as added:
        server.post("/pause_generation", {"mode": "in_place"})
        guess = Answer(server, 1, speculative=True, output_tokens=LONG)
        for _ in range(20):  # ignored until it is known; SGLang sends on the first one after that
            time.sleep(0.02)
            guess.cancel()
        server.post("/continue_generation", {})
        assert guess.abort()["type"] == "abort"
    # The abort leaves right behind the request: the scheduler may have run a pass between the two.
    assert (added["started"], added["cancelled"]) == (1, 1)


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


def test_a_malformed_promotion_is_refused(server):
    for body in ([], {"rids": "a"}, {"rids": [1]}):
        with pytest.raises(urllib.error.HTTPError) as error:
            server.post("/rag/promote", body)
        assert error.value.code == 400
        assert "rids" in json.load(error.value)["error"]["message"]


def test_ids_that_nobody_knows_are_unknown(server):
    ordinary = Answer(server, 1, output_tokens=LONG).decoding()
    reply = server.post("/rag/promote", {"rids": ["nobody", ordinary.rid]})
    assert reply == {"rids": {"nobody": "unknown", ordinary.rid: "unknown"}}
    ordinary.abort()
    assert server.post("/rag/promote", {"rids": []}) == {"rids": {}}
