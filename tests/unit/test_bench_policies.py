"""The benchmark of policies: what it keeps, how it sums up, and replays small enough for a test."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ["claims", "--seeds", "1,2", "--requests", "30", "--warm-up", "10"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_policies")


def found(hits: float, **others: float) -> dict[str, float]:
    result = {"hit_rate": hits, "bound_hit_rate": 0.5, "saved_s": 60 * hits, "bound_saved_s": 30.0}
    result |= {"prefill_s": 100 - 60 * hits, "d2h_bytes": 4e6, "h2d_bytes": 1e6, "cpu_ms": 1.0}
    return result | {"host_gib": 64.0} | others


def test_a_run_goes_on_where_it_stopped(
    bench: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []

    def interrupted(replays: list[Any], processes: int) -> Iterator[tuple[Any, dict[str, float]]]:
        for it in replays[:7]:
            yield it, found(0.1 * it.seed)
        raise KeyboardInterrupt

    def whole(replays: list[Any], processes: int) -> list[tuple[Any, dict[str, float]]]:
        asked.extend(replays)
        return [(it, found(0.1 * it.seed)) for it in replays]

    arguments = [*SMALL, "--results", str(tmp_path / "results.jsonl"), "--json"]
    monkeypatch.setattr(bench, "replayed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.main(arguments)
    monkeypatch.setattr(bench, "replayed", whole)
    assert bench.main(arguments) == 0
    assert asked == list(bench.claims([1, 2], 30, 10))[7:]
    rows = orjson.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(rows) == 30
    assert all(row["hit_rate"] == pytest.approx(0.15) for row in rows)
    asked.clear()
    assert bench.main(arguments) == 0
    assert asked == []


def test_results_of_other_code_and_of_other_servers_do_not_count(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = bench.Replay("burst", "lru", 1, 30, 10)
    assert it.key == replace(it).key
    assert it.key != replace(it, page_size=16).key
    before = it.key
    monkeypatch.setattr(bench, "code_digest", lambda: "changed")
    assert it.key != before


def test_the_digest_is_of_the_whole_package(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(bench, "find_spec", lambda name: package)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "lru.py").write_text("first = 1\n")
    digests = [bench.code_digest.__wrapped__()]
    (tmp_path / "policies" / "lru.py").write_text("first = 2\n")
    digests.append(bench.code_digest.__wrapped__())
    (tmp_path / "history.py").write_text("second = 1\n")
    digests.append(bench.code_digest.__wrapped__())
    assert len(set(digests)) == 3


def test_rows_are_means_over_the_seeds_with_ratios_of_the_same_seed(bench: Any) -> None:
    lru = [bench.Replay("burst", "lru", seed, 30, 10) for seed in (1, 2)]
    plus = [replace(it, label="pgdsf-plus") for it in lru]
    results = (found(0.1), found(0.2), found(0.3, d2h_bytes=1e6), found(0.2, d2h_bytes=2e6))
    done = {it.key: result for it, result in zip(lru + plus, results, strict=True)}
    row = bench.summarise(lru + plus, done)[1]
    assert (row["workload"], row["policy"]) == ("burst, k = 2", "pgdsf-plus")
    assert row["hit_rate"] == pytest.approx(0.25)
    assert row["hits_vs_lru"] == pytest.approx((3 + 1) / 2)
    assert row["d2h_vs_lru"] == pytest.approx((0.25 + 0.5) / 2)
    shares = [row[f"bound_share{end}"] for end in ("_low", "", "_high")]
    assert shares == pytest.approx([0.4, 0.5, 0.6])
    assert "hits_vs_all" not in row


def test_a_part_of_the_memory_is_compared_with_all_of_it(bench: Any) -> None:
    replays = list(bench.memory([1], 30, 10))
    hits = {0.2: found(0.3, bound_hit_rate=0.4), 1.0: found(0.4)}
    rows = bench.summarise(replays, {it.key: hits[it.memory_share] for it in replays})
    assert [row["policy"] for row in rows[:2]] == ["pgdsf, 20%", "pgdsf, 100%"]
    assert rows[0]["hits_vs_all"] == pytest.approx(0.75)
    assert rows[0]["bound_vs_all"] == pytest.approx(0.8)
    head, *lines = bench.table(rows).splitlines()
    assert "hits_vs_all" in head
    assert "hits_vs_lru" not in head
    assert "75.0%" in lines[0]


# Of two documents the second one is rarely seen again behind the same first one, so a fifth of
# what holds them all is more than a fifth of what is used.
@pytest.mark.parametrize(("k", "least"), [(1, 0.66), (2, 0.79)])
def test_a_fifth_of_the_memory_gives_most_of_the_hits_of_all_of_it(
    bench: Any, k: int, least: float
) -> None:
    """Where the top 10% of the documents take half of the retrievals; the RAGCache article says
    80%."""
    replays = [
        replace(it, documents=100)
        for it in bench.memory([1], 1_000, 200)
        if (it.k, it.label) == (k, "pgdsf-plus")
    ]
    fifth, _ = bench.summarise(replays, {it.key: bench.run(it) for it in replays})
    assert least < fifth["hits_vs_all"] < fifth["bound_vs_all"]


def test_a_reordered_queue_finds_more_than_a_known_one(bench: Any) -> None:
    waiting = bench.Replay(
        "mmlu-hot", bench.PLUS_QUEUE, 1, 300, 50, documents=300, memory_share=0.2
    )
    reordered = replace(waiting, label=bench.PLUS_REORDERED)
    assert bench.run(waiting)["hit_rate"] < bench.run(reordered)["hit_rate"]
