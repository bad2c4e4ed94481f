#!/usr/bin/env python3
"""What operators' calls cost the scheduler, on a tree of many documents, without a model.

A scheduler answers an operator between two passes, so nothing is computed meanwhile. The tree is
SGLang's and ours, populated as `bench_tree.py` does it: each document a leaf below one template,
on host. CPU time of the process, median and most of `--repeats` calls, each on another document.

    python benchmarks/bench_control.py [--json] [--nodes N ...] [--repeats R]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from tree_driver import KNOWLEDGE, TreeDriver, server_arguments
from tree_workload import SMALL_TOKENS, Workload

from rag_radix.control.documents import LOOKED_AT, ROWS_AT_ONCE, Page, look, rows
from rag_radix.control.pins import Pin
from rag_radix.control.selector import Selector
from rag_radix.control.tree_view import View, tree_view

DEVICE_TOKENS = 65_536


def main() -> None:
    """Measure, and print a table or, with `--json`, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {str(nodes): _measure(nodes, options.repeats) for nodes in options.nodes}
    if options.json:
        print(json.dumps({"cpu_ms": sizes}))
        return
    for nodes, calls in sizes.items():
        print(f"{int(nodes):,} documents, CPU ms: median (most)")
        for name, times in calls.items():
            print(f"  {name:<22} {times['median']:9.2f} ({times['most']:.2f})")


def _measure(nodes: int, repeats: int) -> dict[str, dict[str, float]]:
    population = Workload(0).population(nodes)
    with server_arguments(DEVICE_TOKENS, nodes * SMALL_TOKENS + DEVICE_TOKENS) as arguments:
        driver = TreeDriver(KNOWLEDGE, arguments, DEVICE_TOKENS, "pgdsf", {"pin_host_share": 0.9})
        driver.populate(population)
        print(f"{driver.nodes:,} nodes", file=sys.stderr)
        tree = driver.tree
        control = tree.control
        names = iter([prompt.names[0] for prompt in population[1 :: max(nodes // 500, 1)]])

        firsts = cycle(range(0, nodes, LOOKED_AT))
        listed = [(prompt.names[0], "", "") for prompt in population[-ROWS_AT_ONCE:]]

        def by_id() -> None:
            assert control.invalidate(Selector(id=next(names))).places == 1

        calls: dict[str, Callable[[], Any]] = {
            "invalidate by id": by_id,
            "invalidate by prefix": lambda: control.invalidate(Selector(prefix=next(names))),
            "invalidate what isn't": lambda: control.invalidate(Selector(id="nobody")),
            "pin": lambda: control.pin(Pin(Selector(id=next(names)), "host")),
            # Of which a page of 100,000 documents takes 34.
            "documents: a look": lambda: look(tree, Page(), next(firsts)),
            "documents: rows": lambda: rows(tree, listed),
            "tree": lambda: tree_view(tree, View()),
            "stats": tree.report,
        }
        gc.collect()
        gc.freeze()
        return {name: _times(call, repeats) for name, call in calls.items()}


def _times(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    times_ms = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        times_ms.append((time.process_time() - started) * 1e3)
    return {"median": statistics.median(times_ms), "most": max(times_ms)}


if __name__ == "__main__":
    main()
