#!/usr/bin/env python3
"""Searches in stages beside Faiss's own, and when their provisional results are already final.

Synthetic unit vectors (see `rag_radix_benchmarks.search_workload`); indexes are built the first
time, which takes minutes, and kept in `--index-dir`. In each round both searches answer all
questions, one at a time, Faiss's first in even rounds and second in odd ones, so that each
question finds the caches as other questions left them. A ratio is ours over Faiss's: above 1,
Faiss is faster. CPU time is given too, since other work on the machine lengthens the rest; both
searches run in the thread that asks. Stages are where `Pace` puts them by default, from the time
it measures here.

For each stage: when it comes, and for which share of questions its documents, in order, are
those of the final stage, as they must be for a speculation to be kept.

    python benchmarks/bench_search.py [--json] [--index-dir DIR] [--vectors N] [--rounds R]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
from rag_radix_benchmarks.figures import environment, spread
from rag_radix_benchmarks.search_workload import Vectors, Workload, load_or_build, make_workload
from rag_radix_frontend.staged_hnsw import StagedHNSW
from rag_radix_frontend.staged_ivf import StagedIVF
from rag_radix_frontend.staged_search import Candidates, FaissSearch, StagedSearch

DIMENSIONS = 384
IVF_FRACTIONS = (0.0073, 0.125, 0.25, 0.5, 1.0)
HNSW_EF_SEARCH = (64, 256, 1024, 4096)
THREADS = 8


class Times(NamedTuple):
    """Seconds on the clock, and of the thread's work."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class StageFigures:
    """One stage over all questions: when it came, and how often it was the final result."""

    time_s: dict[str, float]
    same_as_final: float


@dataclass(frozen=True)
class Case:
    """Both searches of one index with one effort.

    Attributes:
        effort: `nprobe` or `efSearch`.
        search_s: By search, the spread over rounds of the mean time of a question.
        ratio: Ours over Faiss's, over rounds.
        cpu_ratio: The same of CPU time.
        same_result: Share of questions with the same final documents from both.
        recall: Share of the true nearest k among them.
        stages: In order.
        threaded_queries_per_s: By search, with `THREADS` threads asking at once.
    """

    index: str
    effort: int
    search_s: dict[str, dict[str, float]]
    ratio: dict[str, float]
    cpu_ratio: dict[str, float]
    same_result: float
    recall: float
    stages: list[StageFigures]
    threaded_queries_per_s: dict[str, float]


def main() -> None:
    """Measure, and print a table or, with `--json`, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index-dir", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--kinds", nargs="+", default=["ivf", "hnsw"])
    parser.add_argument("--vectors", type=int, default=300_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    workload = make_workload(options.vectors, options.queries, DIMENSIONS, options.seed)
    exact = faiss.knn(
        workload.queries, workload.vectors, options.k, metric=faiss.METRIC_INNER_PRODUCT
    )[1]
    cases = []
    for kind in options.kinds:
        index = load_or_build(kind, workload, options.index_dir, options.seed)
        for effort, ours in _searches(index):
            theirs = FaissSearch(index, nprobe=effort, ef_search=effort)
            case = _measure(kind, effort, theirs, ours, workload, exact, options)
            cases.append(case)
            _print_case(case)
    if options.json:
        report = {
            "vectors": options.vectors,
            "dimensions": DIMENSIONS,
            "queries": options.queries,
            "k": options.k,
            "seed": options.seed,
            "cases": [asdict(case) for case in cases],
            **environment(),
        }
        print(json.dumps(report))


def _searches(index: Any) -> list[tuple[int, StagedSearch]]:
    """(effort, ours) in the order of the report."""
    if StagedIVF.supports(index):
        efforts = [round(fraction * index.nlist) for fraction in IVF_FRACTIONS]
        return [(nprobe, StagedIVF(index, nprobe=nprobe)) for nprobe in efforts]
    return [(ef, StagedHNSW(index, ef_search=ef)) for ef in HNSW_EF_SEARCH]


def _measure(
    kind: str,
    effort: int,
    theirs: StagedSearch,
    ours: StagedSearch,
    workload: Workload,
    exact: Any,
    options: argparse.Namespace,
) -> Case:
    queries, k = workload.queries, options.k
    searches = {"faiss": theirs, "staged": ours}
    ours.warm_up()
    for search in searches.values():
        _run(search, queries, k)
    rounds: dict[str, list[Times]] = {name: [] for name in searches}
    for round_number in range(options.rounds):
        for name in sorted(searches, reverse=round_number % 2 == 1):
            rounds[name].append(_run(searches[name], queries, k))
    pairs = list(zip(rounds["faiss"], rounds["staged"], strict=True))
    results = {name: [list(s.search(q, k))[-1] for q in queries] for name, s in searches.items()}
    return Case(
        index=kind,
        effort=effort,
        search_s={name: spread([r.wall_s for r in runs]) for name, runs in rounds.items()},
        ratio=spread([b.wall_s / a.wall_s for a, b in pairs]),
        cpu_ratio=spread([b.cpu_s / a.cpu_s for a, b in pairs]),
        same_result=_share(map(_same, results["faiss"], results["staged"])),
        recall=float(
            np.mean(
                [np.isin(e, r.positions) for e, r in zip(exact, results["staged"], strict=True)]
            )
        ),
        stages=_stages(ours, queries, k),
        threaded_queries_per_s={
            name: _threaded_queries_per_s(search, queries, k) for name, search in searches.items()
        },
    )


def _run(search: StagedSearch, queries: Vectors, k: int) -> Times:
    """What a question takes, on average over all, one after the other."""
    start = Times(time.perf_counter(), time.thread_time())
    for query in queries:
        for _ in search.search(query, k):
            pass
    return Times(
        (time.perf_counter() - start.wall_s) / len(queries),
        (time.thread_time() - start.cpu_s) / len(queries),
    )


def _stages(search: StagedSearch, queries: Vectors, k: int) -> list[StageFigures]:
    runs: list[list[tuple[float, Candidates]]] = []
    for query in queries:
        start_s = time.perf_counter()
        runs.append([(time.perf_counter() - start_s, c) for c in search.search(query, k)])
    figures = []
    for i in range(max(map(len, runs))):
        # A search that is over early has its last stage for good.
        at_stage = [run[min(i, len(run) - 1)] for run in runs]
        figures.append(
            StageFigures(
                spread([time_s for time_s, _ in at_stage]),
                _share(_same(c, run[-1][1]) for (_, c), run in zip(at_stage, runs, strict=True)),
            )
        )
    return figures


def _threaded_queries_per_s(search: StagedSearch, queries: Vectors, k: int) -> float:
    def ask(query: Vectors) -> None:
        for _ in search.search(query, k):
            pass

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(ask, queries[:THREADS]))
        start_s = time.perf_counter()
        list(pool.map(ask, queries))
        return len(queries) / (time.perf_counter() - start_s)


def _same(a: Candidates, b: Candidates) -> bool:
    return np.array_equal(a.positions, b.positions)


def _share(values: Any) -> float:
    return float(np.mean(list(values)))


def _print_case(case: Case) -> None:
    ms = {name: spread["median"] * 1e3 for name, spread in case.search_s.items()}
    print(
        f"{case.index} {case.effort}: Faiss {ms['faiss']:.2f} ms, staged {ms['staged']:.2f} ms, "
        f"ratio {_spread(case.ratio)}, of CPU time {_spread(case.cpu_ratio)}, same "
        f"result {case.same_result:.1%}, recall {case.recall:.1%}, {THREADS} threads "
        f"{case.threaded_queries_per_s['faiss']:.0f} and "
        f"{case.threaded_queries_per_s['staged']:.0f} questions/s",
        flush=True,
    )
    _print_stages(case.stages)


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"


def _print_stages(stages: Sequence[StageFigures]) -> None:
    for stage in stages:
        print(f"    {stage.time_s['median'] * 1e3:6.2f} ms: {stage.same_as_final:.1%} final")


if __name__ == "__main__":
    main()
