"""`rag-radix bench reordering`: the waiting queue reordered, against first come, first served.

Two real servers that differ in `reorder_window` alone run side by side and serve the same
requests in turn: first `off`, then `on`, the next time the other way round. The load is open,
`--load` times what the server without reordering takes in a closed loop, so that the queue grows
until the last request has come. Caches are emptied before each run, and a part of the trace that
isn't measured fills them again. A ratio is `off` over `on`: above 1, reordering is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rag_radix.launch import serving
from rag_radix.profile.server import ProfiledServer
from rag_radix.replay.trace import TraceRequest
from rag_radix.replay.workloads import WORKLOADS, generate
from rag_radix_benchmarks.figures import environment, percentile, ratios, spread
from rag_radix_benchmarks.load import Run, closed_loop, open_loop
from rag_radix_benchmarks.prompts import PromptWriter

WINDOWS = {"on": 32, "off": 0}
# A request that came this much too late says more about the client than about the server.
LATE_LIMIT_S = 0.25


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rag-radix bench reordering`."""
    parser.add_argument("--model-path", required=True, metavar="MODEL")
    parser.add_argument("--workload", choices=WORKLOADS, default="mmlu-like")
    parser.add_argument("--documents", type=int, default=400, help="in the corpus")
    parser.add_argument("--document-tokens", type=int, default=300, help="of a document, mean")
    parser.add_argument("--k", type=int, default=2, help="documents a request")
    parser.add_argument("--output-tokens", type=int, default=4, help="of a request")
    parser.add_argument("--requests", type=int, default=100, help="measured in a run")
    parser.add_argument("--warm-up", type=int, default=40, help="requests before those")
    parser.add_argument("--load", type=float, default=2.0, help="arrivals by capacity")
    parser.add_argument("--concurrency", type=int, default=4, help="requests that run at once")
    # 5% and 30% of the documents' tokens.
    parser.add_argument("--device-tokens", type=int, default=6_000)
    parser.add_argument("--host-ratio", type=float, default=6.0, help="host by device memory")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one object on the last line")
    parser.add_argument("server_flags", nargs="*", metavar="-- SERVER FLAGS")


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    trace = generate(
        options.workload,
        requests=options.warm_up + options.requests * options.repeats,
        seed=options.seed,
        k=options.k,
        documents=options.documents,
        mean_document_tokens=options.document_tokens,
        output_tokens=options.output_tokens,
    )
    with ExitStack() as stack:
        urls = {
            arm: stack.enter_context(serving(options.model_path, _flags(options, window)))
            for arm, window in WINDOWS.items()
        }
        report = _measure(urls, trace, options)
    print(_table(report))
    if options.json:
        print(json.dumps(report))


def _flags(options: argparse.Namespace, window: int) -> list[str]:
    flags = ["--max-total-tokens", options.device_tokens, "--hicache-ratio", options.host_ratio]
    flags += ["--max-running-requests", options.concurrency, "--log-level", "warning"]
    flags += ["--radix-eviction-policy-config", json.dumps({"reorder_window": window})]
    return [*map(str, flags), *options.server_flags]


def _measure(
    urls: Mapping[str, str], trace: Sequence[TraceRequest], options: argparse.Namespace
) -> dict[str, Any]:
    servers = {arm: ProfiledServer(url) for arm, url in urls.items()}
    writer = PromptWriter(servers["off"].vocabulary(), options.seed)
    bodies = [writer.body(request, number) for number, request in enumerate(trace)]
    warm_up, measured = bodies[: options.warm_up], bodies[options.warm_up :]
    parts = [
        slice(start, start + options.requests)
        for start in range(0, len(measured), options.requests)
    ]
    for arm, url in urls.items():
        closed_loop(url, warm_up[:2], 1)  # what is slow on its first use
        _progress(f"{arm} is up")
    servers["off"].flush()
    closed_loop(urls["off"], warm_up, options.concurrency)
    calibration = closed_loop(urls["off"], measured[parts[0]], options.concurrency)
    capacity = options.requests / calibration.seconds
    _progress(f"capacity: {capacity:.2f} requests/s")
    arrivals = [request.arrival_s for request in trace[options.warm_up :]]
    runs: dict[str, list[Run]] = {arm: [] for arm in urls}
    for repeat, part in enumerate(parts):
        # The trace comes at one request a second on average.
        due_s = [
            (arrival - arrivals[part.start]) / (capacity * options.load)
            for arrival in arrivals[part]
        ]
        for arm in list(urls) if repeat % 2 else reversed(list(urls)):
            servers[arm].wait_until_idle()
            servers[arm].flush()
            closed_loop(urls[arm], warm_up, options.concurrency)
            runs[arm].append(open_loop(urls[arm], measured[part], due_s))
            one = runs[arm][-1]
            _progress(
                f"run {repeat + 1}/{len(parts)} {arm}: mean TTFT {_mean(one.ttft_s):.2f} s, "
                f"hit rate {one.token_hit_rate:.1%}"
            )
    return _report(runs, capacity, options)


def _report(
    runs: Mapping[str, Sequence[Run]], capacity: float, options: argparse.Namespace
) -> dict[str, Any]:
    figures = {
        "mean_ttft_s": lambda run: _mean(run.ttft_s),
        "p90_ttft_s": lambda run: percentile(run.ttft_s, 90),
        "max_ttft_s": lambda run: max(run.ttft_s),
        "token_hit_rate": lambda run: run.token_hit_rate,
        "seconds": lambda run: run.seconds,
        "late_s": lambda run: max(outcome.late_s for outcome in run.outcomes),
        "longest_overtaking": _longest_overtaking,
    }
    values = {
        arm: {name: [figure(run) for run in of_arm] for name, figure in figures.items()}
        for arm, of_arm in runs.items()
    }
    late_s = max(max(of_arm["late_s"]) for of_arm in values.values())
    return {
        "benchmark": "reordering",
        "ratios": {
            name: ratios(values["off"][name], values["on"][name])
            for name in ("mean_ttft_s", "p90_ttft_s", "seconds")
        },
        "arms": {
            arm: {name: spread(of_name) for name, of_name in of_arm.items()}
            for arm, of_arm in values.items()
        },
        "capacity_requests_per_s": capacity,
        "client_kept_up": late_s <= LATE_LIMIT_S,
        **environment(),
        "config": {name: value for name, value in vars(options).items() if name != "run"},
    }


def _longest_overtaking(run: Run) -> int:
    """How many requests that came later had their first token before one, at most."""
    due = [outcome.ttft_s for outcome in run.outcomes]
    first = [run_due + ttft for run_due, ttft in zip(run.due_s, due, strict=True)]
    return max(
        sum(later < mine for later in first[number + 1 :]) for number, mine in enumerate(first)
    )


def _table(report: Mapping[str, Any]) -> str:
    lines = [f"{'':<20} {'off':>10} {'on':>10}   off/on, median (least..most)"]
    for name, on in report["arms"]["on"].items():
        off = report["arms"]["off"][name]
        line = f"{name:<20} {off['median']:>10.3f} {on['median']:>10.3f}"
        if name in report["ratios"]:
            ratio = report["ratios"][name]
            line += f"   {ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"
        lines.append(line)
    if not report["client_kept_up"]:
        lines.append("the client didn't keep up, so these times are partly its own")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
