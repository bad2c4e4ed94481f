"""`rag-radix bench speculation`: generating while the search still runs, against waiting for it.

`rag_retrieve()` programs are run with `speculative=True` and `False`, in turn, on one real server,
which is emptied and warmed up before each run. Their documents come from an IVF index of
`--vectors` vectors, of which a fraction of the clusters is searched: on this machine's cores
(`local`), and as waiting for the stage times measured before the server started (`remote`), as a
vector database elsewhere would have it; `--remote-scale` makes that one larger. Arrivals are
Poisson at `--loads` times what the server takes in a closed loop without speculation. A ratio is
`off` over `on`: above 1, speculation is better; its interval is a 95% confidence interval over the
repeats. Pairs of runs that are done are kept in `--out`, where they are found again by the same
code on such a machine; searches that are waited for are timed anew.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import accumulate, product
from pathlib import Path
from time import perf_counter
from typing import Any

from rag_radix_frontend import RagEndpoint
from rag_radix_frontend.pace import doubling
from rag_radix_frontend.staged_ivf import StagedIVF

from rag_radix.launch import serving
from rag_radix.profile.server import ProfiledServer
from rag_radix_benchmarks.digest import code_digest
from rag_radix_benchmarks.facts import read_tree_report
from rag_radix_benchmarks.figures import environment, percentile, spread
from rag_radix_benchmarks.kept import KeptFigures
from rag_radix_benchmarks.programs import ProgramLoad, ProgramOutcome
from rag_radix_benchmarks.questions import (
    LocalSearch,
    NumberedRetriever,
    Search,
    WaitedSearch,
    ask_by_popularity,
)
from rag_radix_benchmarks.search_workload import load_or_build, make_workload
from rag_radix_benchmarks.statistics import paired_ratio
from rag_radix_benchmarks.tables import plain, ratio_text

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
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep finished pairs, and go on")
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


ARMS = ("off", "on")
# Counters of `/rag/stats` that a pair is the difference of.
_COUNTED = (
    *("started", "refused", "ended", "promoted", "cancelled"),
    *("wasted_tokens", "scheduler_s"),
)

Pair = dict[str, Any]
"""Plain values of two runs of the same questions at the same times: by arm their figures, of the
`answers` how many were `compared` and are `different`, and `server`, what it counted meanwhile."""


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    report = measure(options)
    print(_table(report))
    if options.json:
        print(json.dumps(report))


# Options that decide what a pair is, beside its case and its repeat.
_OF_A_PAIR = (
    *("model_path", "vectors", "remote_scale", "questions", "document_words", "k"),
    *("output_tokens", "requests", "warm_up", "concurrency", "device_tokens", "seed"),
    "server_flags",
)

# That may decide how a pair goes.
_CODE = (
    *("rag_radix", "rag_radix_frontend", "rag_radix_kernels"),
    *(f"rag_radix_benchmarks.{name}" for name in ("programs", "questions", "search_workload")),
    __name__,
)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, with and without speculation.

    Raises:
        ConfigError: `--out` can't be used.
    """
    here = environment()
    kept = KeptFigures(
        None if options.out is None else options.out / "pairs.jsonl",
        {
            **{name: getattr(options, name) for name in _OF_A_PAIR},
            "capacity_of": options.fractions[0],
            "code": code_digest(*_CODE),
            "versions": here["versions"],
            "hardware": {name: here["hardware"][name] for name in ("processor", "cores")},
        },
    )
    cases: dict[Case, list[Pair]] = {}
    with ExitStack() as stack:
        bench = _Bench(options, stack)
        capacity = kept.get(bench.capacity)
        _progress(f"capacity: {capacity:.2f} requests/s")
        for case in (Case(*c) for c in product(options.searches, options.fractions, options.loads)):
            cases[case] = [
                kept.get(partial(bench.pair, case, capacity, repeat), **asdict(case), repeat=repeat)
                for repeat in range(options.repeats)
            ]
            _progress(f"{_name(case)}: {_summary(cases[case])}")
    return _report(cases, capacity, options)


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
    """Programs on a server, which is started when it is first asked and stopped with `stack`."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self._options = options
        self._stack = stack

    @cached_property
    def _searches(self) -> dict[tuple[str, float], Search]:
        return dict(_searches(self._options))

    @cached_property
    def _url(self) -> str:
        assert self._searches, "timed while the machine is quiet"
        options = self._options
        flags = ["--max-total-tokens", options.device_tokens]
        flags += ["--max-running-requests", options.concurrency, "--log-level", "warning"]
        flags = [*map(str, flags), *options.server_flags]
        return self._stack.enter_context(serving(options.model_path, flags))

    @cached_property
    def _server(self) -> ProfiledServer:
        return ProfiledServer(self._url)

    def capacity(self) -> float:
        """Requests a second in a closed loop, without speculation."""
        options = self._options
        questions = self._questions(options.seed)
        load = self._load("local", options.fractions[0], speculative=False)
        self._empty()
        load.run(questions[: options.warm_up], None)
        started_s = perf_counter()
        load.run(questions[options.warm_up :], None)
        return float(options.requests / (perf_counter() - started_s))

    def pair(self, case: Case, capacity: float, repeat: int) -> Pair:
        """Both arms, in turn, of the same questions at the same times."""
        options = self._options
        # Questions and times are those of every case's repeat.
        seed = options.seed + 1 + repeat
        questions = self._questions(seed)
        gaps = random.Random(f"arrivals {seed}")
        rate = case.load * capacity
        due_s = list(accumulate(gaps.expovariate(rate) for _ in range(options.requests)))
        runs: dict[str, list[ProgramOutcome]] = {}
        before = self._counted()
        for arm in reversed(ARMS) if repeat % 2 else ARMS:
            load = self._load(case.search, case.fraction, speculative=arm == "on")
            self._empty()
            load.run(questions[: options.warm_up], None)
            measured = questions[options.warm_up :]
            runs[arm] = load.run(measured, due_s, first=options.warm_up)
        after = self._counted()
        texts = [[outcome.text for outcome in runs[arm]] for arm in ARMS]
        return {
            **{
                arm: {name: float(figure(of_arm)) for name, figure in _FIGURES.items()}
                for arm, of_arm in runs.items()
            },
            "answers": {
                "compared": options.requests,
                "different": sum(one != other for one, other in zip(*texts, strict=True)),
            },
            "server": {name: after[name] - before[name] for name in _COUNTED},
        }

    def _load(self, search: str, fraction: float, *, speculative: bool) -> ProgramLoad:
        options, endpoint = self._options, RagEndpoint(self._url)
        retriever = NumberedRetriever(self._searches[search, fraction], options.document_words)
        return ProgramLoad(endpoint, retriever, options.k, options.output_tokens, speculative)

    def _questions(self, seed: int) -> list[int]:
        options = self._options
        return ask_by_popularity(options.questions, options.warm_up + options.requests, seed)

    def _counted(self) -> dict[str, float]:
        counters: dict[str, float] = read_tree_report(self._url)["speculation"]
        return counters

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
    cases: Mapping[Case, Sequence[Pair]], capacity: float, options: argparse.Namespace
) -> dict[str, Any]:
    pairs = [pair for of_case in cases.values() for pair in of_case]
    counted = {name: sum(pair["server"][name] for pair in pairs) for name in _COUNTED}
    return {
        "benchmark": "speculation",
        "cases": [{**asdict(case), **_compared(of_case)} for case, of_case in cases.items()],
        "capacity_requests_per_s": capacity,
        "server": counted,
        # All requests that weren't speculative, and all passes, are in it.
        "scheduler_s_per_speculation": counted["scheduler_s"] / max(1, counted["started"]),
        **environment(),
        "config": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name not in ("run", "out")
        },
    }


def _compared(pairs: Sequence[Pair]) -> dict[str, Any]:
    values = {arm: {name: [pair[arm][name] for pair in pairs] for name in _FIGURES} for arm in ARMS}
    answers = {
        name: sum(pair["answers"][name] for pair in pairs) for name in ("compared", "different")
    }
    return {
        "ratios": {
            name: asdict(paired_ratio(values["off"][name], values["on"][name])) for name in _RATIOS
        },
        "arms": {
            arm: {name: spread(of_name) for name, of_name in of_arm.items()}
            for arm, of_arm in values.items()
        },
        "answers": answers,
        "same_answers": not answers["different"],
    }


def _table(report: Mapping[str, Any]) -> str:
    header = [
        *("search", "index", "load", "search off, ms", "not overlapped on, ms", "ratio"),
        *("TTFT off, s", "on, s", "ratio", "kept", "same answers"),
    ]
    rows = []
    for case in report["cases"]:
        on, off, ratio = case["arms"]["on"], case["arms"]["off"], case["ratios"]
        rows.append(
            [
                case["search"],
                f"{case['fraction']:.1%}",
                f"{case['load']:.2f}",
                f"{off['search_not_overlapped_s']['median'] * 1e3:.1f}",
                f"{on['search_not_overlapped_s']['median'] * 1e3:.1f}",
                ratio_text(ratio["search_not_overlapped_s"]),
                f"{off['mean_ttft_s']['median']:.3f}",
                f"{on['mean_ttft_s']['median']:.3f}",
                ratio_text(ratio["mean_ttft_s"]),
                f"{on['kept']['median']:.0%}",
                same_answers(case),
            ]
        )
    return (
        f"{plain(header, rows)}\nCPU time of the scheduler in speculations, by those started: "
        f"{report['scheduler_s_per_speculation'] * 1e3:.3f} ms"
    )


def same_answers(case: Mapping[str, Any]) -> str:
    """How many answers of a case are the same with and without speculation."""
    compared, different = (case["answers"][name] for name in ("compared", "different"))
    return f"{compared - different} of {compared}"


def _summary(pairs: Sequence[Pair]) -> str:
    compared = _compared(pairs)
    words = [f"{name} off/on {ratio_text(ratio)}" for name, ratio in compared["ratios"].items()]
    return ", ".join([*words, f"{same_answers(compared)} answers the same"])


def _name(case: Case) -> str:
    return f"{case.search} search of {case.fraction:.1%}, load {case.load:g}"


def _mean(values: Iterator[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
