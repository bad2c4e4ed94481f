#!/usr/bin/env python3
"""What a scheduling pass costs to order a long waiting queue, without a model.

The tree, its pools and the waiting requests are SGLang's and ours, over KV of two bytes a token.
The tree holds `--documents` documents, `k` to a prompt of about 8,000 tokens, and both tiers are
full, so that what is served evicts. Between two passes the first `--served` requests of the order
are served, and as many arrive. Timed: the order, with looking up again what of the waiting prompts
the tree has changed and looking up the new ones. Python's garbage collector is frozen and disabled
meanwhile.

    python benchmarks/bench_order.py [--json] [--queue N ...] [--served N] [--passes N]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import psutil

from rag_radix.reordering import load_share
from rag_radix.replay.driver import Replayer, knowledge_tree_replayer
from rag_radix.replay.reference_cost import LOAD_S_PER_TOKEN, a10g_mistral_cost_table
from rag_radix.replay.trace import TraceRequest
from rag_radix.replay.workloads import generate
from rag_radix.waiting_queue import WaitingQueue

TARGET_MS = 5.0
K, DOCUMENT_TOKENS = 5, 1_600


def main() -> None:
    """Measure, and print a table or, with `--json`, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queue", type=int, nargs="+", default=[100, 1_000])
    parser.add_argument("--documents", type=int, default=10_000, help="in the tree")
    parser.add_argument("--served", type=int, default=2, help="requests between two passes")
    parser.add_argument("--passes", type=int, default=200)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    lengths = {str(queue): _measure(queue, options) for queue in options.queue}
    result = {
        "target_ms": TARGET_MS,
        "queue": lengths,
        "settings": {**vars(options), "k": K, "document_tokens": DOCUMENT_TOKENS},
        "python": platform.python_version(),
        "sglang": version("sglang"),
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
    }
    print(_table(lengths, options))
    if options.json:
        print(json.dumps(result))


def _measure(queue: int, options: argparse.Namespace) -> dict[str, float]:
    served = options.documents // K
    requests = iter(
        generate(
            "mmlu-like",
            requests=served + queue + options.served * options.passes,
            seed=options.seed,
            k=K,
            documents=options.documents,
            mean_document_tokens=DOCUMENT_TOKENS,
        )
    )
    tokens = options.documents * DOCUMENT_TOKENS
    cost = a10g_mistral_cost_table()
    with knowledge_tree_replayer(
        "pgdsf",
        {},
        device_tokens=tokens // 4,
        host_tokens=tokens // 2,
        longest_request_tokens=131_072,
        cost=cost,
        page_size=options.page_size,
        granularity=1,
    ) as replayer:
        for _ in range(served):
            replayer.serve(next(requests))
        waiting = [replayer._arrive(next(requests)) for _ in range(queue)]
        order = WaitingQueue(replayer.tree, options.window, load_share(cost, LOAD_S_PER_TOKEN))
        order.arrange([arrival.req for arrival in waiting])  # all are new to it
        gc.freeze()
        gc.disable()
        try:
            wall_s, cpu_s, walks = _passes(replayer, order, waiting, requests, options)
        finally:
            gc.enable()
            gc.unfreeze()
        return {
            "median_ms": 1e3 * statistics.median(wall_s),
            "p99_ms": 1e3 * statistics.quantiles(wall_s, n=100)[98],
            "median_cpu_ms": 1e3 * statistics.median(cpu_s),
            "looked_up_per_pass": walks / options.passes,
            "most_overtakings": order.order.most_overtakings,
            "tree_nodes": len(replayer.tree.tree_core.nodes()),
        }


def _passes(
    replayer: Replayer,
    order: WaitingQueue,
    waiting: list[Any],
    requests: Iterator[TraceRequest],
    options: argparse.Namespace,
) -> tuple[list[float], list[float], int]:
    wall_s, cpu_s = [], []
    walks = order.tracker.walks
    for _ in range(options.passes):
        reqs = [arrival.req for arrival in waiting]
        wall, cpu = time.perf_counter(), time.thread_time()
        arranged = order.arrange(reqs)
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.thread_time() - cpu)
        arrivals = {arrival.req: arrival for arrival in waiting}
        for req in arranged[: options.served]:
            order.serve(req)
            replayer._serve(arrivals[req])
        waiting = [arrivals[req] for req in arranged[options.served :]]
        waiting += [replayer._arrive(next(requests)) for _ in range(options.served)]
    return wall_s, cpu_s, order.tracker.walks - walks


def _table(lengths: dict[str, dict[str, float]], options: argparse.Namespace) -> str:
    lines = [
        f"A pass over a queue, {options.documents:,} documents asked for, {K} to a prompt of about "
        f"{K * DOCUMENT_TOKENS:,} tokens, {options.served} served in between (goal at 1,000: "
        f"{TARGET_MS:g} ms)",
        f"{'waiting':>10}{'median':>12}{'p99':>12}{'CPU median':>14}{'looked up':>12}{'nodes':>10}",
    ]
    lines += [
        f"{int(queue):>10,}{each['median_ms']:>9.2f} ms{each['p99_ms']:>9.2f} ms"
        f"{each['median_cpu_ms']:>11.2f} ms{each['looked_up_per_pass']:>12.1f}"
        f"{each['tree_nodes']:>10,.0f}"
        for queue, each in lengths.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
