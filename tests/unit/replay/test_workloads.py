"""Synthetic workloads have the properties that their table states."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rag_radix.errors import ConfigError
from rag_radix.replay.popularity import (
    RANKED,
    calibrated_shares,
    make_corpus,
    perturbed_ranks,
    rank_shares,
    top_share,
)
from rag_radix.replay.trace import TraceRequest
from rag_radix.replay.workloads import WORKLOADS, generate


def small(name: str, *, requests: int = 4_000, seed: int = 1, k: int = 2) -> list[TraceRequest]:
    return generate(name, requests=requests, seed=seed, k=k, documents=3_000)


def retrievals(trace: list[TraceRequest]) -> list[str]:
    return [document.id for request in trace for document in request.documents]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_trace_and_another_one_another(name: str) -> None:
    assert small(name, requests=200) == small(name, requests=200)
    assert small(name, requests=200) != small(name, requests=200, seed=2)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_prompts_hold_k_documents_a_hop_with_template_text_between(name: str, k: int) -> None:
    trace = small(name, requests=200, k=k)
    arrivals = [request.arrival_s for request in trace]
    assert arrivals == sorted(arrivals)
    for request in trace:
        assert len(request.documents) == k * WORKLOADS[name].hops
        end = 0
        for document in request.documents:
            assert end < document.start < document.end
            end = document.end
        assert 50 <= request.prompt_tokens - end <= 150


@pytest.mark.parametrize(
    ("name", "part", "share"),
    [("mmlu-like", 0.03, 0.60), ("mmlu-hot", 0.03, 0.85), ("nq-like", 0.10, 0.50)],
)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_hot_documents_get_the_stated_share_of_the_retrievals(
    name: str, part: float, share: float, k: int
) -> None:
    # Many requests for each document, so that luck doesn't make documents hot.
    trace = generate(name, requests=30_000, seed=5, k=k, documents=1_500)
    counts = sorted(Counter(retrievals(trace)).values(), reverse=True)
    hot = round(1_500 * part)
    assert sum(counts[:hot]) / sum(counts) == pytest.approx(share, abs=0.02)


def test_expected_share_is_met_for_the_full_corpus() -> None:
    corpus = make_corpus(np.random.default_rng(0), 300_000, 1_500)
    shares = calibrated_shares(corpus, part=0.03, share=0.60, k=2)
    assert top_share(corpus.document_shares(shares, 2), 0.03) == pytest.approx(0.60, abs=1e-6)
    assert corpus.lengths_tokens.mean() == pytest.approx(1_500, rel=0.01)
    assert all(len(set(row)) == RANKED for row in corpus.ranking.tolist())


@pytest.mark.parametrize("k", [1, 3, 8])
def test_ranks_are_perturbed_as_often_as_expected(k: int) -> None:
    ranks = perturbed_ranks(np.random.default_rng(0), 200_000, k)
    found = np.bincount(ranks.ravel(), minlength=RANKED) / ranks.size
    assert found == pytest.approx(rank_shares(k), abs=0.003)
    assert (ranks[:, 0] == 0).mean() == pytest.approx(0.8, abs=0.005)


def test_uniform_has_no_hot_documents() -> None:
    counts = Counter(retrievals(small("uniform", requests=20_000)))
    assert max(counts.values()) < 7 * np.mean(list(counts.values()))


def test_drift_changes_what_is_popular_every_20k_requests() -> None:
    trace = generate("drift", requests=40_000, seed=2, documents=3_000)

    def popular(first: int) -> set[str]:
        counts = Counter(retrievals(trace[first : first + 10_000]))
        return {document for document, _ in counts.most_common(50)}

    assert len(popular(0) & popular(10_000)) > 40
    assert len(popular(10_000) & popular(20_000)) < 40
    assert len(popular(20_000) & popular(30_000)) > 40


def test_bursts_repeat_a_topic_within_300_requests() -> None:
    def repeated(name: str) -> float:
        trace = generate(name, requests=5_000, seed=2, documents=100_000)
        recent = [
            {request.documents[0].id for request in trace[max(i - 300, 0) : i]}
            for i in range(5_000)
        ]
        return float(
            np.mean([r.documents[0].id in seen for r, seen in zip(trace, recent, strict=True)])
        )

    assert repeated("burst") > repeated("mmlu-like") + 0.15


def test_drift_and_bursts_can_be_sized_to_a_short_trace() -> None:
    def popular(trace: list[TraceRequest]) -> set[str]:
        counts = Counter(retrievals(trace))
        return {document for document, _ in counts.most_common(20)}

    drift = generate("drift", requests=6_000, seed=2, documents=300, drift_every=3_000)
    assert len(popular(drift[:1_500]) & popular(drift[1_500:3_000])) > 15
    assert len(popular(drift[1_500:3_000]) & popular(drift[3_000:4_500])) < 15

    def repeated(window: int) -> float:
        trace = generate("burst", requests=2_000, seed=2, documents=30_000, burst_window=window)
        topics = [request.documents[0].id for request in trace]
        return float(np.mean([topics[i] in topics[max(i - 5, 0) : i] for i in range(2_000)]))

    assert repeated(5) > repeated(300) + 0.2


@pytest.mark.parametrize(("name", "k"), [("mmlu-like", 5), ("hotpot-like", 3), ("drift", 1)])
def test_documents_are_cut_so_that_every_prompt_fits(name: str, k: int) -> None:
    def longest(limit: int | None) -> int:
        trace = generate(
            name,
            requests=2_000,
            seed=1,
            k=k,
            documents=3_000,
            mean_document_tokens=1_000,
            most_prompt_tokens=limit,
        )
        return max(request.prompt_tokens for request in trace)

    assert longest(None) > 4_096 >= longest(4_096) > 2_500
    with pytest.raises(ConfigError, match="no room for"):
        longest(150)


@pytest.mark.parametrize("name", ["drift", "burst", "drift-burst"])
def test_a_tenth_of_the_retrievals_in_dynamic_workloads_is_never_repeated(name: str) -> None:
    documents = retrievals(small(name))
    one_offs = [document for document in documents if int(document[1:]) >= 3_000]
    assert len(set(one_offs)) == len(one_offs)
    assert len(one_offs) / len(documents) == pytest.approx(0.1, abs=0.02)


def test_a_scan_passes_through_many_documents_once() -> None:
    def once(name: str) -> int:
        trace = generate(name, requests=4_000, seed=1, documents=30_000)
        return sum(count == 1 for count in Counter(retrievals(trace)).values())

    assert once("scan") > once("mmlu-like") + 1_000


def test_updates_give_documents_new_versions_in_order() -> None:
    latest: dict[str, int] = {}
    changes = 0
    trace = small("update-heavy")
    for request in trace:
        for document in request.documents:
            version = int(document.version[1:])
            before = latest.get(document.id, 0)
            assert version in (before, before + 1)
            changes += version - before
            latest[document.id] = version
    assert changes / len(retrievals(trace)) == pytest.approx(0.05, abs=0.02)


def test_a_second_hop_follows_generated_text_that_repeats_with_the_wording() -> None:
    trace = small("hotpot-like")
    gaps = Counter(
        (
            tuple(document.id for document in request.documents[:2]),
            request.documents[2].start - request.documents[1].end,
        )
        for request in trace
    )
    assert all(60 <= gap <= 260 for _, gap in gaps)
    assert max(gaps.values()) > 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "zipf"}, "no workload 'zipf': take one of mmlu-like"),
        ({"k": 0}, "k=0"),
        ({"k": 9}, "k=9"),
        ({"documents": 5}, "documents=5"),
    ],
)
def test_what_cannot_be_generated_is_named(arguments: dict[str, object], message: str) -> None:
    given = {"name": "mmlu-like", "requests": 1, "seed": 0, **arguments}
    name = str(given.pop("name"))
    with pytest.raises(ConfigError, match=message):
        generate(name, **given)  # type: ignore[arg-type]
