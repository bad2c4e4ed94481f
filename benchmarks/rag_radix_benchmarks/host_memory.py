"""`rag-radix bench host-memory`: hit rates over host memory, policy by policy.

Replays of a synthetic trace through the real tree, one request at a time and without a model; the
same trace served by a real server one at a time has the same hit rate. Host sizes are parts of the
corpus. `at most` is the clairvoyant bound of the same trace. Replays that are done are kept in
`--out`, where they are found again as long as the code that they ran on is the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rag_radix.errors import ConfigError
from rag_radix.policies import POLICIES
from rag_radix.replay.bound import clairvoyant_bound
from rag_radix.replay.options import sglang_muted
from rag_radix.replay.runs import PolicyVariant, ReplayServer, replay
from rag_radix.replay.trace import TraceRequest
from rag_radix.replay.workloads import WORKLOADS, generate
from rag_radix_benchmarks.digest import code_digest
from rag_radix_benchmarks.figures import environment, spread
from rag_radix_benchmarks.kept import KeptFigures
from rag_radix_benchmarks.progress import progress
from rag_radix_benchmarks.tables import plain


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rag-radix bench host-memory`."""
    parser.add_argument("--workload", choices=WORKLOADS, default="mmlu-like")
    parser.add_argument("--policies", default="lru,lfu,gdsf,pgdsf,pgdsf-plus")
    parser.add_argument("--documents", type=int, default=300, help="in the corpus")
    parser.add_argument("--document-tokens", type=int, default=200, help="of a document, mean")
    parser.add_argument("--k", type=int, default=2, help="documents a request")
    parser.add_argument("--device-tokens", type=int, default=3_000)
    parser.add_argument("--host-percent", default="1,5,10,20,30,50", help="of the corpus")
    parser.add_argument("--requests", type=int, default=5_000, help="measured in a replay")
    parser.add_argument("--warm-up", type=int, default=2_000, help="requests before those")
    parser.add_argument("--repeats", type=int, default=3, help="seeds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep finished replays, and go on")
    parser.add_argument("--json", action="store_true", help="end with one object on the last line")


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    report = measure(options)
    print(plain(*table(report)))
    if options.json:
        print(json.dumps(report))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All sizes and policies, on the same traces.

    Raises:
        ConfigError: An unknown policy, a size that is none, or a folder that can't be used.
    """
    policies = [name.strip() for name in options.policies.split(",")]
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"--policies {name!r} doesn't exist: use {', '.join(POLICIES)}")
    try:
        percents = [float(each) for each in options.host_percent.split(",")]
    except ValueError:
        raise ConfigError(
            f"--host-percent {options.host_percent!r}: give numbers, separated by commas"
        ) from None
    traces = [
        generate(
            options.workload,
            requests=options.warm_up + options.requests,
            seed=options.seed + repeat,
            k=options.k,
            documents=options.documents,
            mean_document_tokens=options.document_tokens,
        )
        for repeat in range(options.repeats)
    ]
    corpus_tokens = options.documents * options.document_tokens
    kept = KeptFigures(
        None if options.out is None else options.out / "replays.jsonl",
        {
            **{name: getattr(options, name) for name in _OF_A_REPLAY},
            "code": code_digest("rag_radix", __name__),
        },
    )
    with sglang_muted():
        sizes = [
            _at(percent, round(percent / 100 * corpus_tokens), policies, traces, options, kept)
            for percent in percents
        ]
    return {
        "benchmark": "host-memory",
        "sizes": sizes,
        **environment(),
        "config": {
            name: value for name, value in vars(options).items() if name not in ("run", "out")
        },
    }


# Options that decide what a replay is, beside its seed, its policy and the host tier.
_OF_A_REPLAY = (
    *("workload", "documents", "document_tokens", "k"),
    *("device_tokens", "requests", "warm_up"),
)


def _at(
    percent: float,
    host_tokens: int,
    policies: list[str],
    traces: Sequence[Sequence[TraceRequest]],
    options: argparse.Namespace,
    kept: KeptFigures,
) -> dict[str, Any]:
    # Pages of one token: with few tokens a larger page would count.
    server = ReplayServer(options.device_tokens, host_tokens, page_size=1)
    seeded = [(options.seed + repeat, trace) for repeat, trace in enumerate(traces)]
    bounds = [
        kept.get(partial(_bound, trace, server, options.warm_up), seed=seed, host=host_tokens)
        for seed, trace in seeded
    ]
    found: dict[str, dict[str, Any]] = {}
    for name in policies:
        totals = [
            kept.get(
                partial(_replayed, trace, name, server, options.warm_up),
                seed=seed,
                host=host_tokens,
                policy=name,
            )
            for seed, trace in seeded
        ]
        saved = [
            (bound["uncached_s"] - each["prefill_s"]) / bound["saved_s"]
            for bound, each in zip(bounds, totals, strict=True)
        ]
        found[name] = {
            "hit_rate": spread([each["hit_rate"] for each in totals]),
            "share_of_bound": spread(saved),
            "moved_tokens": spread([each["moved_tokens"] for each in totals]),
        }
        rate = found[name]["hit_rate"]["median"]
        progress(f"host {percent:g}% of the corpus, {name}: hit rate {rate:.1%}")
    return {
        "host_percent": percent,
        "host_tokens": host_tokens,
        "bound_hit_rate": spread([bound["hit_rate"] for bound in bounds]),
        "policies": found,
    }


def _bound(trace: Sequence[TraceRequest], server: ReplayServer, warm_up: int) -> dict[str, float]:
    bound = clairvoyant_bound(
        trace,
        device_tokens=server.device_tokens,
        host_tokens=server.host_tokens,
        cost=server.cost,
        load_s_per_token=server.load_s_per_token,
        warm_up=warm_up,
    )
    return {
        "hit_rate": bound.hit_rate,
        "uncached_s": bound.uncached_s,
        "saved_s": bound.saved_s,
    }


def _replayed(
    trace: Sequence[TraceRequest], policy: str, server: ReplayServer, warm_up: int
) -> dict[str, float]:
    totals = replay(trace, PolicyVariant(policy, policy), server, warm_up=warm_up)
    return {
        "hit_rate": totals.token_hit_rate,
        "prefill_s": totals.prefill_s,
        "moved_tokens": (totals.d2h_bytes / server.kv_bytes_per_token) / totals.requests,
    }


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: hit rate and, in brackets, the share of the bound, medians over seeds."""
    names = list(report["sizes"][0]["policies"])
    rows = [
        [
            f"{size['host_percent']:g}%",
            *(
                f"{found['hit_rate']['median']:.1%} ({found['share_of_bound']['median']:.2f})"
                for found in size["policies"].values()
            ),
            f"{size['bound_hit_rate']['median']:.1%}",
        ]
        for size in report["sizes"]
    ]
    return ["host tier by corpus", *names, "at most"], rows
