#!/usr/bin/env python3
"""What the knowledge tree costs per request, beside stock `UnifiedRadixCache`, without a model.

The trees, allocators, host pools, controller and requests are SGLang's and ours; only the copies
of KV are left out. The trees are built side by side and given the same prompts in alternating
rounds. A ratio is stock over ours: above 1, ours is faster.

Timed, per request, are the calls that SGLang's scheduler makes of the tree: match, load-back,
lock, the slots of what was found, making room (the evictions that this request causes in both
tiers), the checkpoint after prefill (insert, cutting at document boundaries, naming, counting),
polling for finished copies, and the checkpoint and release at the end. Not timed: the request
itself, what the scheduler does with it in between, handing out slots, copies. Both tiers are
full, so that requests evict. Python's garbage collector is frozen and disabled meanwhile.

The tree holds `--nodes` documents on host, each a leaf below one template, so that the heaps and
sets of leaves are as large as they get. A document of 1,600 tokens takes 25 kB of indices, which
100,000 times three trees would not fit an ordinary machine: these have 64 tokens and are kept
from eviction (as popular documents of the knowledge tree, as just used ones of stock), while the
prompts measured have five documents of 1,200 to 2,000 tokens and evict one another. So a request
inserts and evicts as many nodes as it would with documents of that size throughout. Stock runs
`lru` and, like ours, copies to host at eviction (`write_back`).

Memory is growth of the process's resident set while the population goes in, divided by its
nodes, what was freed meanwhile being handed back first (glibc's `malloc_trim`); it includes 16
bytes of key and host slot for each of the 64 tokens.

    python benchmarks/bench_tree.py [--json] [--nodes N ...] [--policy NAME] [--rounds R]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from tree_driver import KNOWLEDGE, STOCK_CORES, Served, TreeDriver, server_arguments
from tree_workload import SMALL_TOKENS, Prompt, Workload

from rag_radix.policies import DEFAULT_POLICY, POLICIES

MEDIAN_TARGET_MS, P99_TARGET_MS = 0.5, 1.0
DEVICE_TOKENS = 65_536
# Host slots for the documents of measured prompts, besides those of the population.
HOST_TOKENS = 327_680
# Enough for the measured prompts to fill both tiers, in parts after which the population is
# touched again.
WARM_UP_ROUNDS, WARM_UP_REQUESTS = 6, 15


def main() -> None:
    """Measure, and print tables or, with `--json`, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument(
        "--stock", nargs="*", choices=STOCK_CORES, default=list(STOCK_CORES), help="to run beside"
    )
    parser.add_argument("--policy", choices=sorted(POLICIES), default=DEFAULT_POLICY)
    parser.add_argument("--policy-config", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=20, help="in a round, per tree")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what SGLang's imports made would be looked through at every collection
    try:
        sizes = {str(nodes): _measure(nodes, options) for nodes in options.nodes}
    finally:
        gc.unfreeze()
    report = _report(sizes, options)
    print(json.dumps(report) if options.json else _tables(report))


def _measure(nodes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Build the trees with a population of `nodes` documents each and serve alternating rounds."""
    workload = Workload(options.seed)
    population = workload.population(nodes)
    host_tokens = nodes * SMALL_TOKENS + HOST_TOKENS
    with server_arguments(DEVICE_TOKENS, host_tokens) as arguments:
        drivers, memory_bytes = [], {}
        for name in (KNOWLEDGE, *options.stock):
            driver = TreeDriver(
                name, arguments, DEVICE_TOKENS, options.policy, options.policy_config
            )
            memory_bytes[name] = _populate(driver, population)
            drivers.append(driver)
        for _ in range(WARM_UP_ROUNDS):
            _round(drivers, population, [workload.request() for _ in range(WARM_UP_REQUESTS)])
        full = {driver.name: driver.host_available_tokens for driver in drivers}
        if max(full.values()) > workload.prompt_tokens:
            raise RuntimeError(f"the host tier isn't full yet: {full} slots are free")
        rounds = []
        with _collector_off():
            for number in range(options.rounds):
                prompts = [workload.request() for _ in range(options.requests)]
                turn = number % len(drivers)
                rounds.append(_round([*drivers[turn:], *drivers[:turn]], population, prompts))
            _progress(f"{nodes:,} documents: {options.rounds} rounds")
            prompts = [workload.request() for _ in range(options.requests)]
            phases = {driver.name: _phases(driver, population, prompts) for driver in drivers}
        trees = {
            driver.name: {
                "core": type(driver.tree.tree_core).__name__,
                "nodes": driver.nodes,
                "memory_bytes_per_node": memory_bytes[driver.name] / nodes,
                "phases_per_request": phases[driver.name],
                **_times([served[driver.name] for served in rounds]),
            }
            for driver in drivers
        }
    return {"trees": trees, "ratios": _ratios(rounds)}


def _populate(driver: TreeDriver, population: Sequence[Prompt]) -> int:
    """Insert the population; return by how many bytes the process has grown."""
    before = _resident_bytes()
    driver.populate(population)
    _progress(f"{driver.name}: {len(population):,} documents")
    return _resident_bytes() - before


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident: int = psutil.Process().memory_info().rss
    return resident


def _round(
    drivers: Sequence[TreeDriver], population: Sequence[Prompt], prompts: Sequence[Prompt]
) -> dict[str, list[Served]]:
    served = {}
    for driver in drivers:
        driver.keep(population)
        served[driver.name] = [driver.serve(prompt) for prompt in prompts]
    return served


def _phases(
    driver: TreeDriver, population: Sequence[Prompt], prompts: Sequence[Prompt]
) -> dict[str, dict[str, float]]:
    """CPU seconds and calls per request of each phase, those of nested phases not included."""
    driver.keep(population)
    with driver.phases() as seconds:
        for prompt in prompts:
            driver.serve(prompt)
    return {
        phase: {"seconds": sum(calls) / len(prompts), "calls": len(calls) / len(prompts)}
        for phase, calls in seconds.items()
    }


@contextmanager
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _times(rounds: Sequence[Sequence[Served]]) -> dict[str, Any]:
    served = [request for requests in rounds for request in requests]
    wall, cpu = [one.wall_s for one in served], [one.cpu_s for one in served]
    return {
        "median_s": statistics.median(wall),
        "p99_s": _percentile(wall, 99),
        "cpu_median_s": statistics.median(cpu),
        "cpu_p99_s": _percentile(cpu, 99),
        "round_medians_s": _spread(
            [statistics.median(one.wall_s for one in requests) for requests in rounds]
        ),
        "device_hit_tokens": statistics.mean(one.device_hit_tokens for one in served),
        "host_hit_tokens": statistics.mean(one.host_hit_tokens for one in served),
    }


def _ratios(rounds: Sequence[dict[str, list[Served]]]) -> dict[str, dict[str, float]]:
    """By stock tree: spread over the rounds of its median time divided by ours."""
    ratios = defaultdict(list)
    for served in rounds:
        medians = {
            name: statistics.median(one.wall_s for one in requests)
            for name, requests in served.items()
        }
        for name, seconds in medians.items():
            if name != KNOWLEDGE:
                ratios[name].append(seconds / medians[KNOWLEDGE])
    return {name: _spread(values) for name, values in ratios.items()}


def _percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` of 100 values don't exceed."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _growth(medians_s: dict[int, float]) -> dict[str, float]:
    """Least-squares fit of `seconds = base + per_doubling * log2(nodes)`, and the growth from
    the smallest to the largest tree beside that of log(nodes)."""
    sizes = sorted(medians_s)
    logs = [math.log2(nodes) for nodes in sizes]
    fit = statistics.linear_regression(logs, [medians_s[nodes] for nodes in sizes])
    return {
        "base_s": fit.intercept,
        "per_doubling_s": fit.slope,
        "measured": medians_s[sizes[-1]] / medians_s[sizes[0]],
        "log_n": logs[-1] / logs[0],
    }


def _report(sizes: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    largest = str(max(options.nodes))
    head = sizes[largest]["trees"][KNOWLEDGE]
    median_ms, p99_ms = head["median_s"] * 1e3, head["p99_s"] * 1e3
    growth = {
        name: _growth({int(n): size["trees"][name]["median_s"] for n, size in sizes.items()})
        for name in (KNOWLEDGE, *options.stock)
        if len(sizes) > 1
    }
    return {
        "nodes": int(largest),
        "median_ms": median_ms,
        "p99_ms": p99_ms,
        "target": {
            "median_ms": MEDIAN_TARGET_MS,
            "p99_ms": P99_TARGET_MS,
            "met": median_ms <= MEDIAN_TARGET_MS and p99_ms <= P99_TARGET_MS,
        },
        "memory_bytes_per_node": head["memory_bytes_per_node"],
        "ratio": {n: spread["median"] for n, spread in sizes[largest]["ratios"].items()},
        "spread": sizes[largest]["ratios"],
        "growth": growth,
        "sizes": sizes,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("sglang", "torch", "rag-radix")},
        },
        "hardware": {"processor": _processor(), "cores": psutil.cpu_count()},
        "config": {
            **{key: value for key, value in vars(options).items() if key != "json"},
            "device_tokens": DEVICE_TOKENS,
            "host_tokens_beside_population": HOST_TOKENS,
            "garbage_collector": "frozen and disabled",
        },
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _tables(report: dict[str, Any]) -> str:
    lines = [
        f"{'documents':>9} {'tree':<13} {'median':>8} {'p99':>8} {'CPU p50':>8} {'CPU p99':>8} "
        f"{'B/node':>7} {'hit':>12}  stock/ours min..max"
    ]
    for nodes, size in report["sizes"].items():
        for name, tree in size["trees"].items():
            times = " ".join(
                f"{tree[key] * 1e3:>6.3f}ms"
                for key in ("median_s", "p99_s", "cpu_median_s", "cpu_p99_s")
            )
            hits = f"{tree['device_hit_tokens']:.0f}+{tree['host_hit_tokens']:.0f}"
            line = (
                f"{int(nodes):>9,} {name:<13} {times} {tree['memory_bytes_per_node']:>7,.0f} "
                f"{hits:>12}"
            )
            if spread := size["ratios"].get(name):
                line += f"  {spread['median']:.2f}x {spread['min']:.2f}..{spread['max']:.2f}"
            lines.append(line)
    for nodes, size in report["sizes"].items():
        lines += ["", f"{int(nodes):,} documents: CPU microseconds (calls) per request"]
        lines.append(f"{'':<15}" + "".join(f"{name:>19}" for name in size["trees"]))
        by_tree = [tree["phases_per_request"] for tree in size["trees"].values()]
        for phase in dict.fromkeys(phase for phases in by_tree for phase in phases):
            cells = [
                f"{cell['seconds'] * 1e6:.1f} ({cell['calls']:.1f})" if cell else "-"
                for cell in (phases.get(phase) for phases in by_tree)
            ]
            lines.append(f"{phase:<15}" + "".join(f"{cell:>19}" for cell in cells))
    for name, growth in report["growth"].items():
        lines.append(
            f"\n{name}: {growth['base_s'] * 1e3:.3f} ms + {growth['per_doubling_s'] * 1e6:.1f} us "
            f"for each doubling; grows {growth['measured']:.2f}x where log n grows "
            f"{growth['log_n']:.2f}x"
        )
    target = report["target"]
    lines.append(
        f"\ntarget with {report['nodes']:,} documents: median {target['median_ms']} ms, "
        f"p99 {target['p99_ms']} ms: {'met' if target['met'] else 'missed'} "
        f"({report['median_ms']:.3f}, {report['p99_ms']:.3f})"
    )
    return "\n".join(lines)


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
