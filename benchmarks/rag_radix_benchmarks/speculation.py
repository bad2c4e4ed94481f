"""`rag-radix bench speculation`: generating while the search still runs, against waiting for it.

`rag_retrieve()` programs are run with `speculative=True` and `False`, in turn, on one real server,
which is emptied and warmed up before each run. Their documents come from an IVF index of
`--vectors` vectors, of which a fraction of the clusters is searched: on this machine's cores
(`local`), and as waiting for the stage times measured before the server started (`remote`), as a
vector database elsewhere would have it; `--remote-scale` makes that one larger. Arrivals are
Poisson at `--loads` times what the server takes in a closed loop without speculation. A ratio is
`off` over `on`: above 1, speculation is better.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from time import perf_counter
from typing import Any

from rag_radix_frontend import RagEndpoint
from rag_radix_frontend.pace import doubling
from rag_radix_frontend.staged_ivf import StagedIVF

from rag_radix.launch import serving
from rag_radix.profile.server import ProfiledServer
from rag_radix_benchmarks.facts import read_tree_report
from rag_radix_benchmarks.figures import environment, percentile, ratios, spread
from rag_radix_benchmarks.programs import ProgramLoad, ProgramOutcome
from rag_radix_benchmarks.questions import (
    LocalSearch,
    NumberedRetriever,
    Search,
    WaitedSearch,
    ask_by_popularity,
)
from rag_radix_benchmarks.search_workload import load_or_build, make_workload

DIMENSIONS = 384
SEARCHES = ("remote", "local")
FRACTIONS = (0.125, 0.25, 0.5, 1.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rag-radix bench speculation`."""
    parser.add_argument("--model-path", required=True, metavar="MODEL")
    parser.add_argument(
        "--index-dir",
        type=Path,
        default=Path(".cache/bench"),
        help="where the index is kept; building it takes minutes the first time",
    )
    parser.add_argument("--vectors", type=int, default=300_000, help="in the index")
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS)
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=SEARCHES)
    parser.add_argument(
        "--remote-scale", type=float, default=1.0, help="of the times that are waited"
    )
    parser.add_argument("--questions", type=int, default=100, help="different ones")
    parser.add_argument("--document-words", type=int, default=120)
    parser.add_argument("--k", type=int, default=2, help="documents a request")
    parser.add_argument("--output-tokens", type=int, default=8, help="of a request")
    parser.add_argument("--requests", type=int, default=24, help="of a run")
    parser.add_argument("--warm-up", type=int, default=12, help="requests before those")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=(0.5, 2.0), help="arrivals by capacity"
    )
    parser.add_argument("--concurrency", type=int, default=4, help="requests that run at once")
    parser.add_argument("--device-tokens", type=int, default=16_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one object on the last line")
    parser.add_argument("server_flags", nargs="*", metavar="-- SERVER FLAGS")


@dataclass(frozen=True)
class Case:
    """What is compared with and without speculation.

    Attributes:
        search: "local" or "remote".
        fraction: Of the index's clusters, that a search visits.
        load: Arrivals by the server's capacity.
    """

    search: str
    fraction: float
    load: float


Runs = dict[str, list[list[ProgramOutcome]]]


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    report = measure(options)
    print(_table(report))
    if options.json:
        print(json.dumps(report))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, with and without speculation."""
    searches = dict(_searches(options))
    flags = ["--max-total-tokens", options.device_tokens]
    flags += ["--max-running-requests", options.concurrency, "--log-level", "warning"]
    with serving(options.model_path, [*map(str, flags), *options.server_flags]) as url:
        bench = _Bench(url, options)
        capacity = bench.capacity(searches["local", options.fractions[0]])
        _progress(f"capacity: {capacity:.2f} requests/s")
        cases = {}
        for case in (Case(*c) for c in product(options.searches, options.fractions, options.loads)):
            search = searches[case.search, case.fraction]
            cases[case] = bench.compare(search, case.load * capacity)
            _progress(f"{_name(case)}: {_summary(cases[case])}")
        totals = read_tree_report(url)["speculation"]
    return _report(cases, capacity, totals, options)


def _searches(options: argparse.Namespace) -> Iterator[tuple[tuple[str, float], Search]]:
    """Of each kind and fraction; those that are waited for are timed here.

    A larger index elsewhere cuts its searches by the time that they take there.
    """
    workload = make_workload(options.vectors, options.questions, DIMENSIONS, options.seed)
    index = load_or_build("ivf", workload, options.index_dir, options.seed)
    for fraction in options.fractions:
        nprobe = max(1, round(fraction * index.nlist))
        staged = StagedIVF(index, nprobe=nprobe)
        staged.warm_up()
        local = LocalSearch(staged, workload.queries)
        yield ("local", fraction), local
        asked = range(options.questions), options.k, options.remote_scale
        waited_s = WaitedSearch.record(local, *asked).mean_s
        paced = StagedIVF(index, nprobe=nprobe, stages=doubling(waited_s))
        recorded = WaitedSearch.record(LocalSearch(paced, workload.queries), *asked)
        _progress(f"{fraction:.1%} of the index: a search waits {recorded.mean_s * 1e3:.1f} ms")
        yield ("remote", fraction), recorded


class _Bench:
    """One server, and programs on it."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._endpoint = RagEndpoint(url)
        self._server = ProfiledServer(url)
        self._options = options
        self._asked = 0

    def capacity(self, search: Search) -> float:
        """Requests a second in a closed loop, without speculation."""
        options = self._options
        questions = self._questions(options.warm_up + options.requests)
        load = self._load(search, speculative=False)
        self._empty()
        load.run(questions[: options.warm_up], None)
        started_s = perf_counter()
        load.run(questions[options.warm_up :], None)
        return float(options.requests / (perf_counter() - started_s))

    def compare(self, search: Search, requests_per_s: float) -> Runs:
        """Runs of both arms, in turn, of the same questions at the same times."""
        options, runs = self._options, Runs(on=[], off=[])
        for repeat in range(options.repeats):
            questions = self._questions(options.warm_up + options.requests)
            gaps = random.Random(self._asked)
            due_s = list(
                accumulate(gaps.expovariate(requests_per_s) for _ in range(options.requests))
            )
            for arm in ("on", "off") if repeat % 2 else ("off", "on"):
                load = self._load(search, speculative=arm == "on")
                self._empty()
                load.run(questions[: options.warm_up], None)
                measured = questions[options.warm_up :]
                runs[arm].append(load.run(measured, due_s, first=options.warm_up))
        return runs

    def _load(self, search: Search, *, speculative: bool) -> ProgramLoad:
        options = self._options
        retriever = NumberedRetriever(search, options.document_words)
        return ProgramLoad(self._endpoint, retriever, options.k, options.output_tokens, speculative)

    def _questions(self, count: int) -> list[int]:
        self._asked += 1
        options = self._options
        return ask_by_popularity(options.questions, count, options.seed + self._asked)

    def _empty(self) -> None:
        self._server.wait_until_idle()
        self._server.flush()


_FIGURES: dict[str, Callable[[Sequence[ProgramOutcome]], float]] = {
    "mean_ttft_s": lambda run: _mean(outcome.ttft_s for outcome in run),
    "p90_ttft_s": lambda run: percentile([outcome.ttft_s for outcome in run], 90),
    "search_s": lambda run: _mean(outcome.retrieval.search_s for outcome in run),
    "search_not_overlapped_s": lambda run: _mean(
        outcome.retrieval.search_not_overlapped_s for outcome in run
    ),
    **{
        name: lambda run, name=name: _mean(getattr(outcome.retrieval, name) for outcome in run)  # type: ignore[misc]
        for name in ("stages", "started", "kept", "cancelled", "refused", "ended", "wasted_tokens")
    },
    "late_s": lambda run: max(outcome.late_s for outcome in run),
}
_RATIOS = ("mean_ttft_s", "p90_ttft_s", "search_not_overlapped_s")


def _report(
    cases: Mapping[Case, Runs],
    capacity: float,
    totals: Mapping[str, float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    return {
        "benchmark": "speculation",
        "cases": [{**vars(case), **_compared(runs)} for case, runs in cases.items()],
        "capacity_requests_per_s": capacity,
        "server": dict(totals),
        # All requests that weren't speculative, and all passes, are in it.
        "scheduler_s_per_speculation": totals["scheduler_s"] / max(1, totals["started"]),
        **environment(),
        "config": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name != "run"
        },
    }


def _compared(runs: Runs) -> dict[str, Any]:
    values = {
        arm: {name: [figure(run) for run in of_arm] for name, figure in _FIGURES.items()}
        for arm, of_arm in runs.items()
    }
    return {
        "ratios": {name: ratios(values["off"][name], values["on"][name]) for name in _RATIOS},
        "arms": {
            arm: {name: spread(of_name) for name, of_name in of_arm.items()}
            for arm, of_arm in values.items()
        },
        "same_answers": [[o.text for o in run] for run in runs["on"]]
        == [[o.text for o in run] for run in runs["off"]],
    }


def _table(report: Mapping[str, Any]) -> str:
    lines = [
        f"{'search':<8}{'index':>7}{'load':>6}  {'search off':>11}{'not overlapped on':>19}"
        f"{'ratio':>7} (least..most)  {'TTFT off':>9}{'on':>8}{'ratio':>7} (least..most)  kept"
    ]
    for case in report["cases"]:
        on, off, ratio = case["arms"]["on"], case["arms"]["off"], case["ratios"]
        lines.append(
            f"{case['search']:<8}{case['fraction']:>7.1%}{case['load']:>6.2f}  "
            f"{off['search_not_overlapped_s']['median'] * 1e3:>9.1f}ms"
            f"{on['search_not_overlapped_s']['median'] * 1e3:>17.1f}ms"
            f"{_ratio(ratio['search_not_overlapped_s'])}  "
            f"{off['mean_ttft_s']['median']:>8.3f}s{on['mean_ttft_s']['median']:>7.3f}s"
            f"{_ratio(ratio['mean_ttft_s'])}  {on['kept']['median']:.0%}"
        )
    lines.append(
        "CPU time of the scheduler in speculations, by those started: "
        f"{report['scheduler_s_per_speculation'] * 1e3:.3f} ms"
    )
    return "\n".join(lines)


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:>7.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"


def _summary(runs: Runs) -> str:
    ratio = _compared(runs)["ratios"]
    return ", ".join(f"{name} off/on {ratio[name]['median']:.2f}" for name in _RATIOS)


def _name(case: Case) -> str:
    return f"{case.search} search of {case.fraction:.1%}, load {case.load:g}"


def _mean(values: Iterator[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
