"""What the benchmark of updates asks, and when which document changes."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_updates")


def texts(body: dict[str, Any]) -> dict[tuple[str, str], tuple[int, ...]]:
    documents = body["sampling_params"]["custom_params"]["rag"]["documents"]
    return {
        (each["id"], each["version"]): tuple(body["input_ids"][each["start"] : each["end"]])
        for each in documents
    }


def test_an_update_changes_half_of_one_document(bench: Any) -> None:
    corpus = bench.Corpus(documents=3, tokens=20)
    before = texts(corpus.body([0, 1], 7))
    assert texts(corpus.body([1, 0], 8)) == before
    corpus.update(1)
    after = texts(corpus.body([0, 1], 7))
    assert after["document/0", "0"] == before["document/0", "0"]
    old, new = before["document/1", "0"], after["document/1", "1"]
    assert old[:10] == new[:10]
    assert old[10:] != new[10:]
    assert len(new) == 20


def test_each_question_is_asked_once(bench: Any) -> None:
    corpus = bench.Corpus(documents=2, tokens=20)
    assert len({tuple(corpus.body([0], n)["input_ids"]) for n in range(50)}) == 50


def test_arms_are_asked_the_same_and_updated_alike(bench: Any) -> None:
    plan = bench.plan(documents=40, requests=400, update_every=50)
    assert plan == bench.plan(documents=40, requests=400, update_every=50)
    assert list(plan.updates) == [50, 100, 150, 200, 250, 300, 350]
    counts = Counter(document for asked in plan.asked for document in asked)
    assert counts[0] > 5 * counts[39]
    assert bench.plan(documents=40, requests=400, update_every=0).updates == {}
