"""Figures of a comparison, from runs whose answers are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rag_radix_benchmarks.ab import is_precise
from rag_radix_benchmarks.answers import agreement, check_same_model
from rag_radix_benchmarks.arms import STOCK_ARMS
from rag_radix_benchmarks.facts import WrongArmError
from rag_radix_benchmarks.limits import Limits
from rag_radix_benchmarks.load import Outcome, Run
from rag_radix_benchmarks.results import Cell, Comparison, documents_found
from rag_radix_benchmarks.workload import Part
from unit.benchmarks.comparison_data import SETUP, WORKLOAD, result_of

from rag_radix.replay.trace import TraceDocument, TraceRequest

LRU, HICACHE = STOCK_ARMS["stock-lru"], STOCK_ARMS["stock-hicache"]
PARTS = [WORKLOAD.part(repeat) for repeat in range(2)]


def tokens(cached, new):
    """Prefill cost in seconds, if a token takes one."""
    return float(new)


def comparison(*cells, reference=HICACHE):
    by_arm = {arm.name: Cell(tuple(results)) for arm, results in cells}
    limits = Limits.of(PARTS, SETUP, tokens)
    return Comparison({"1 at once": by_arm}, reference.name, PARTS, limits)


def test_ratios_are_the_arm_by_the_reference_repeat_by_repeat():
    report = comparison(
        (LRU, [result_of(LRU, 3.0), result_of(LRU, 0.3)]),
        (HICACHE, [result_of(HICACHE, 1.0), result_of(HICACHE, 0.1)]),
    ).as_json()
    ratio = report["ratios"]["1 at once"][LRU.name]["mean_ttft"]
    assert (ratio["value"], ratio["low"], ratio["high"]) == pytest.approx((3, 3, 3))
    assert report["reference"] == HICACHE.name
    assert HICACHE.name not in report["ratios"]["1 at once"]


def test_figures_are_over_the_requests_of_all_repeats():
    cell = Cell((result_of(LRU, 1.0, hit_tokens=100), result_of(LRU, 3.0, hit_tokens=300)))
    figures = cell.figures(PARTS, Limits.of(PARTS, SETUP, tokens))
    assert figures["requests"] == 2 * WORKLOAD.requests
    assert figures["ttft_s"]["mean"] == pytest.approx(2)
    assert figures["tpot_s"]["mean"] == pytest.approx(0.5)
    assert figures["requests_per_s"] == pytest.approx(WORKLOAD.requests / 10)
    assert figures["token_hit_rate"] == figures["device_hit_rate"] == pytest.approx(0.5)
    assert figures["recomputed_tokens"] == pytest.approx(200)
    assert figures["moved_bytes"] is None


def one_request(hit_tokens):
    outcome = Outcome(1.0, 1.0, 0.0, 100, hit_tokens, 0, 1, (1,))
    return Run((outcome,), (0.0,), 1.0)


@pytest.mark.parametrize(
    ("hit_tokens", "whole", "found_tokens"),
    [(0, 0, 0), (10, 0, 0), (25, 0, 15), (40, 1, 30), (50, 1, 30), (60, 1, 35), (99, 2, 50)],
)
def test_documents_are_found_as_far_as_the_cached_prefix_reaches(hit_tokens, whole, found_tokens):
    documents = (TraceDocument("a", "", 10, 40), TraceDocument("b", "", 55, 75))
    part = Part((), (TraceRequest(0.0, documents, 100),))
    found = documents_found(part, one_request(hit_tokens))
    assert (found.documents, found.whole, found.tokens) == (2, whole, found_tokens)


def repeated_prompts():
    """Two prompts of one document, one of 100 tokens and a question of 50, twice each."""
    requests = tuple(
        TraceRequest(float(i), (TraceDocument(name, "", 10, 110),), 160)
        for i, name in enumerate("abab")
    )
    return [Part((), requests)]


def served(hits):
    outcomes = tuple(Outcome(1.0, 1.0, 0.0, 160, hit, 0, 1, (1,)) for hit in hits)
    return Run(outcomes, tuple(map(float, range(len(hits)))), 4.0)


def test_the_bound_is_reached_by_a_cache_that_keeps_everything():
    limits = Limits.of(repeated_prompts(), SETUP, tokens)
    assert limits.document_hit_rate == pytest.approx(200 / 640)
    # Without documents cached, the template's 10 tokens are.
    assert limits.saved_share == pytest.approx(200 / 600)
    assert limits.share_reached([served([10, 10, 110, 110])]) == pytest.approx(1)
    assert limits.share_reached([served([10, 10, 10, 10])]) == pytest.approx(0)
    assert limits.share_reached([served([10, 10, 110, 10])]) == pytest.approx(0.5)


def test_a_share_of_nothing_is_none():
    part = Part((), (TraceRequest(0.0, (TraceDocument("a", "", 10, 110),), 160),))
    assert Limits.of([part], SETUP, tokens).share_reached([served([10])]) is None


def test_answers_are_compared_request_by_request():
    ours, theirs = result_of(LRU, 1.0), result_of(HICACHE, 1.0, answer=9)
    found = agreement([ours.run, theirs.run], [ours.run, ours.run])
    assert found.compared == 2 * WORKLOAD.requests
    assert found.different == found.first_tokens_different == WORKLOAD.requests


def test_answers_that_one_server_does_not_tell_are_not_compared():
    ours, theirs = result_of(LRU, 1.0).run, served([0] * WORKLOAD.requests)
    unknown = Run(tuple(replace(each, output_ids=()) for each in theirs.outcomes), (), 1.0)
    assert agreement([unknown], [ours]).compared == 0


def test_an_arm_that_answers_as_another_model_would_is_refused():
    ours, theirs = [result_of(LRU, 1.0).run], [result_of(HICACHE, 1.0, answer=9).run]
    check_same_model("a", {"b": agreement(ours, ours)})
    with pytest.raises(WrongArmError, match="b and a answer 5 of 5 requests differently"):
        check_same_model("a", {"b": agreement(theirs, ours)})


@pytest.mark.parametrize(("late_s", "kept_up"), [(0.01, True), (0.2, False)])
def test_a_client_that_is_late_is_reported(late_s, kept_up):
    arms = [
        (arm, [result_of(arm, 1.0, late_s=late_s), result_of(arm, 1.0)]) for arm in (LRU, HICACHE)
    ]
    assert comparison(*arms).as_json()["client_kept_up"] is kept_up


@pytest.mark.parametrize(
    ("ttft_s", "precision", "precise"),
    [
        ([3.0, 0.3], 0.05, True),
        ([3.0, 0.2], 0.05, False),
        ([3.0], 0.05, False),
        ([3.0], None, True),
    ],
)
def test_repeats_are_enough_when_every_interval_is_narrow(ttft_s, precision, precise):
    cells = {
        LRU.name: Cell(tuple(result_of(LRU, each) for each in ttft_s)),
        HICACHE.name: Cell(tuple(result_of(HICACHE, each) for each in [1.0, 0.1][: len(ttft_s)])),
    }
    assert is_precise({"a load": cells}, HICACHE.name, precision) is precise
