"""Figures of a comparison, from runs whose answers are known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rag_radix_benchmarks.ab import is_precise
from rag_radix_benchmarks.answers import agreement, check_same_model
from rag_radix_benchmarks.arms import STOCK_ARMS
from rag_radix_benchmarks.facts import WrongArmError
from rag_radix_benchmarks.limits import Limits, UsedText, memory_words
from rag_radix_benchmarks.load import Outcome, Run
from rag_radix_benchmarks.results import HITS, Cell, Comparison, documents_found
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


def test_hits_that_a_server_does_not_count_are_unknown_and_not_none():
    def cell(*counted):
        known = result_of(LRU, 1.0, hit_tokens=100)
        outcomes = [replace(known.run.outcomes[0], hits_counted=each) for each in counted]
        return Cell((replace(known, run=replace(known.run, outcomes=tuple(outcomes))),))

    limits = Limits.of(PARTS[:1], SETUP, tokens)
    requests = WORKLOAD.requests
    unknown = cell(*[False] * requests).figures(PARTS[:1], limits)
    assert {unknown[name] for name in HITS} == {None}
    assert unknown["ttft_s"]["mean"] == 1.0
    # A server that counts may leave out that it found nothing.
    found = cell(True, *[False] * (requests - 1)).figures(PARTS[:1], limits)
    assert found["token_hit_rate"] == pytest.approx(0.25)


def test_documents_found_are_unknown_where_they_stand_in_another_order():
    results = (result_of(LRU, 1.0, hit_tokens=100), result_of(LRU, 3.0, hit_tokens=300))
    figures = Cell(results, in_order=False).figures(PARTS, Limits.of(PARTS, SETUP, tokens))
    assert (figures["document_hit_rate"], figures["hit_documents"]) == (None, None)
    assert figures["token_hit_rate"] == pytest.approx(0.5)


def test_scheduling_is_the_sum_of_its_parts_a_request():
    parts_s = {"choosing": 0.02, "keeping": 0.01}
    results = [replace(result_of(LRU, 1.0), scheduling_parts_s=parts_s)] * 2
    figures = Cell(tuple(results)).figures(PARTS, Limits.of(PARTS, SETUP, tokens))
    each = {part: seconds / WORKLOAD.requests for part, seconds in parts_s.items()}
    assert figures["scheduling_parts_s"] == pytest.approx(each)
    assert figures["scheduling_s"] == pytest.approx(0.03 / WORKLOAD.requests)
    unknown = Cell((results[0], result_of(LRU, 1.0)))
    assert unknown.figures(PARTS, Limits.of(PARTS, SETUP, tokens))["scheduling_s"] is None


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
    assert limits.as_json()["document_hit_rate"] == pytest.approx(200 / 640)
    # Without documents cached, the template's 10 tokens are.
    assert limits.saved_share == pytest.approx(200 / 600)
    assert limits.share_reached([served([10, 10, 110, 110])]) == pytest.approx(1)
    assert limits.share_reached([served([10, 10, 10, 10])]) == pytest.approx(0)
    assert limits.share_reached([served([10, 10, 110, 10])]) == pytest.approx(0.5)


def test_the_bound_of_unlimited_memory_stands_beside_that_of_the_tiers():
    # Each document is 100 tokens long, so that a tier of 150 keeps one of both.
    small = replace(SETUP, device_tokens=100, host_tokens=50)
    bound = Limits.of(repeated_prompts(), small, tokens).as_json()
    assert bound["unlimited"]["saved_share"] == pytest.approx(200 / 600)
    assert bound["unlimited"]["document_hit_rate"] == pytest.approx(200 / 640)
    assert bound["saved_share"] == pytest.approx(150 / 600, abs=1e-3)
    assert bound["tier_tokens"] == 150
    # The template's 10 tokens once, two documents, four questions.
    assert bound["used_tokens"] == {"documents": 200, "all": 410}


@pytest.mark.parametrize(
    ("tier_tokens", "said"),
    [
        (410, "hold all that a run used.*this run can't tell policies apart"),
        (409, "hold all documents.*can't tell policies apart by which documents"),
        (150, "at most 33.3% .* a run used 200 tokens of documents, both tiers hold 150\\.$"),
    ],
)
def test_a_report_says_how_far_the_memory_was_a_limit(tier_tokens, said):
    setup = replace(SETUP, device_tokens=100, host_tokens=tier_tokens - 100)
    assert re.search(said, memory_words(Limits.of(repeated_prompts(), setup, tokens).as_json()))


def test_documents_that_are_asked_for_once_need_no_memory():
    once = TraceRequest(4.0, (TraceDocument("c", "", 10, 110),), 160)
    (part,) = repeated_prompts()
    setup = replace(SETUP, device_tokens=100, host_tokens=150)
    limits = Limits.of([Part((), (*part.measured, once))], setup, tokens)
    assert "enough for all that are asked for again" in memory_words(limits.as_json())


def test_a_document_behind_another_text_is_used_twice():
    first = TraceRequest(
        0.0, (TraceDocument("a", "", 10, 40), TraceDocument("b", "", 50, 80)), 100, 5
    )
    second = TraceRequest(1.0, (TraceDocument("b", "", 10, 40),), 60)
    # Of templates, 10 tokens at the start, shared, and 10 behind "a".
    assert UsedText.of([first, first, second]) == UsedText(90, 90 + 20 + 25 + 25 + 20)


def test_evicted_tokens_are_a_request_s_where_all_repeats_counted_them():
    limits = Limits.of(PARTS, SETUP, tokens)
    counted = [
        replace(result_of(LRU, 1.0), evicted_tokens={"device": 30, "host": each})
        for each in (0, 20)
    ]
    figures = Cell(tuple(counted)).figures(PARTS, limits)
    assert figures["evicted_tokens"] == {"device": 6.0, "host": 2.0}
    figures = Cell((counted[0], result_of(LRU, 1.0))).figures(PARTS, limits)
    assert figures["evicted_tokens"] is None


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


@pytest.mark.parametrize(("lag_s", "kept_up"), [(0.02, True), (0.2, False), (None, True)])
def test_a_client_that_reads_late_is_reported(lag_s, kept_up):
    known = result_of(LRU, 1.0)
    result = replace(known, run=replace(known.run, lag_s=lag_s))
    arms = [(arm, [result, result]) for arm in (LRU, HICACHE)]
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
