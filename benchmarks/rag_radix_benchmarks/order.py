"""`rag-radix bench order`: what the order of a prompt's documents does to cache and answers.

First replays of synthetic traces through the real tree, without a model: token hit rate and
modelled prefill time with the documents as they are retrieved (`score`), always in the same order
(`canonical`), and in the order of which the tree has most (`cached_first`).

Then, with `--model-path`, questions about Python's language reference, asked with `rag_retrieve()`
one after the other on a real server: time to the first token, hit rate, which share of the answers
is that of `score`, and which share contains what a right answer does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_radix.replay.runs import PolicyVariant, ReplayServer, replay
from rag_radix.replay.workloads import WORKLOADS, generate
from rag_radix_benchmarks.arrangements import ARRANGEMENTS
from rag_radix_benchmarks.figures import environment, ratios, spread


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rag-radix bench order`."""
    parser.add_argument("--model-path", metavar="MODEL", help="ask a real model, too")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=["mmlu-like"])
    parser.add_argument("--k", type=int, nargs="+", default=[2, 5], help="documents a request")
    parser.add_argument("--requests", type=int, default=20_000, help="measured in a replay")
    parser.add_argument("--warm-up", type=int, default=5_000, help="requests before those")
    parser.add_argument("--replay-device-tokens", type=int, default=50_000)
    parser.add_argument("--replay-host-tokens", type=int, default=524_288)
    parser.add_argument("--rounds", type=int, default=4, help="in which all questions are asked")
    parser.add_argument("--answer-k", type=int, default=3, help="documents a question")
    parser.add_argument("--device-tokens", type=int, default=6_000, help="of the real server")
    parser.add_argument("--repeats", type=int, default=3, help="seeds and runs of a kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one object on the last line")
    parser.add_argument("server_flags", nargs="*", metavar="-- SERVER FLAGS")


@dataclass(frozen=True, slots=True)
class Case:
    """A replayed workload."""

    workload: str
    k: int


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    cases = [Case(workload, k) for workload in options.workloads for k in options.k]
    report: dict[str, Any] = {
        "benchmark": "order",
        "replays": [_replayed(case, options) for case in cases],
    }
    if options.model_path is not None:
        from rag_radix_benchmarks.order_answers import ask_in_orders

        report["answers"] = ask_in_orders(options, _progress)
    report |= environment()
    report["config"] = {name: value for name, value in vars(options).items() if name != "run"}
    print(_table(report))
    if options.json:
        print(json.dumps(report))


def _replayed(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    server = ReplayServer(
        device_tokens=options.replay_device_tokens, host_tokens=options.replay_host_tokens
    )
    hit_rates: dict[str, list[float]] = {order: [] for order in ARRANGEMENTS}
    prefill_s: dict[str, list[float]] = {order: [] for order in ARRANGEMENTS}
    for repeat in range(options.repeats):
        trace = generate(
            case.workload,
            requests=options.warm_up + options.requests,
            seed=options.seed + repeat,
            k=case.k,
        )
        for order, arrange in ARRANGEMENTS.items():
            served = replay(
                trace,
                PolicyVariant("pgdsf", "pgdsf"),
                server,
                warm_up=options.warm_up,
                arrange=arrange,
            )
            hit_rates[order].append(served.token_hit_rate)
            prefill_s[order].append(served.prefill_s)
            _progress(
                f"{case.workload}, k={case.k}, seed {options.seed + repeat}, {order}: "
                f"hit rate {served.token_hit_rate:.1%}"
            )
    return {
        "workload": case.workload,
        "k": case.k,
        "orders": {
            order: {
                "token_hit_rate": spread(hit_rates[order]),
                "prefill_score_over_this": ratios(prefill_s["score"], prefill_s[order]),
            }
            for order in ARRANGEMENTS
        },
    }


def _table(report: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [
        ("", "order", "hit rate", "prefill time, score/this (least..most)")
    ]
    for case in report["replays"]:
        for order, found in case["orders"].items():
            rows.append(
                (
                    f"{case['workload']}, k={case['k']}",
                    order,
                    f"{found['token_hit_rate']['median']:.1%}",
                    _ratio(found["prefill_score_over_this"]),
                )
            )
    lines = _aligned(rows)
    if "answers" in report:
        header = "asked a model|order|hit rate|TTFT|score/this (least..most)|as score|expected"
        rows = [tuple(header.split("|"))]
        for order, found in report["answers"]["orders"].items():
            rows.append(
                (
                    f"k={report['answers']['k']}",
                    order,
                    f"{found['token_hit_rate']['median']:.1%}",
                    f"{found['mean_ttft_s']['median']:.3f} s",
                    _ratio(found["ttft_score_over_this"]),
                    f"{found['same_as_score']:.0%}",
                    f"{found['contains_expected']:.0%}",
                )
            )
        lines += ["", *_aligned(rows)]
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
