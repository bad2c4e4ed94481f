"""`rag-radix bench ab`: what the knowledge tree gains over stock SGLang, here.

Each arm is a real server; all have the same model, attention, memory and requests, and differ in
the cache alone, which each server is asked for before anything is believed of it. In each repeat
the arms take turns, in changing order. A run empties the cache, fills it with requests that aren't
measured and then measures. A ratio is an arm over the reference: above 1, the reference is faster;
its interval is a 95% confidence interval over the repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rag_radix_benchmarks.ab_options import Plan, add_options
from rag_radix_benchmarks.answers import check_same_model
from rag_radix_benchmarks.arms import Arm
from rag_radix_benchmarks.charts import check_plottable
from rag_radix_benchmarks.experiment import Experiment, progress
from rag_radix_benchmarks.figures import environment
from rag_radix_benchmarks.limits import Limits, prefill_cost
from rag_radix_benchmarks.report import as_text, write
from rag_radix_benchmarks.results import Cell, Comparison
from rag_radix_benchmarks.servers import Servers
from rag_radix_benchmarks.throughputs import search_throughputs
from rag_radix_benchmarks.trials import ClosedLoop, Load, OpenLoop, TrialStore

__all__ = ["add_options", "run"]


def run(options: argparse.Namespace) -> None:
    """Measure and report."""
    plan = Plan.of(options)
    if options.report is not None:
        check_plottable()
    for folder in (options.out, options.report):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    cost = prefill_cost(plan.setup.model_path, options.cost_table)
    store = TrialStore(None if options.out is None else options.out / "runs.jsonl")
    with Servers(plan.setup, plan.servers, logs=options.out) as servers:
        experiment = Experiment(plan.setup, plan.workload, servers, store, options.seed)
        loads, capacity = _loads(plan, experiment)
        cells = _measure(plan, experiment, loads)
        throughputs = None
        if options.throughput:
            capacity = experiment.capacity(plan.capacity_of)
            throughputs = search_throughputs(experiment, plan.arms, capacity, plan.repeats)
    parts = [plan.workload.part(repeat) for repeat in range(plan.repeats)]
    comparison = Comparison(cells, plan.reference.name, parts, Limits.of(parts, plan.setup, cost))
    check_same_model(plan.reference.name, comparison.agreements())
    report = {
        "benchmark": "ab",
        **comparison.as_json(),
        "capacity_requests_per_s": capacity,
        "throughput": throughputs and throughputs.as_json(plan.reference.name),
        **environment(),
        "config": _config(options, plan),
        "command": sys.argv[1:],
    }
    if options.report is not None:
        write(report, options.report)
    print(as_text(report))
    if options.json:
        print(json.dumps(report))


def _loads(plan: Plan, experiment: Experiment) -> tuple[dict[str, Load], float | None]:
    """The loads by their labels, and the capacity that some are parts of."""
    loads: dict[str, Load] = {}
    capacity = None
    if plan.shares:
        capacity = experiment.capacity(plan.capacity_of)
        progress(f"capacity of {plan.capacity_of.name}: {capacity:.3g} requests/s")
        for share in plan.shares:
            rate = share * capacity
            label = f"{share:.0%} of the capacity of {plan.capacity_of.name}, {rate:.3g} requests/s"
            loads[label] = OpenLoop(rate)
    each: list[Load] = [*map(OpenLoop, plan.rates), *map(ClosedLoop, plan.concurrencies)]
    return loads | {str(load): load for load in each}, capacity


def _measure(
    plan: Plan, experiment: Experiment, loads: dict[str, Load]
) -> dict[str, dict[str, Cell]]:
    trials = {
        (label, arm.name, repeat): experiment.trial(arm, load, repeat)
        for repeat in range(plan.repeats)
        for label, load in loads.items()
        for arm in turn(plan.arms, repeat)
    }
    missing = sum(not experiment.is_done(trial) for trial in trials.values())
    progress(f"{len(trials)} runs, {len(trials) - missing} of them done before")
    results = {}
    started, done = time.monotonic(), 0
    for place, trial in trials.items():
        was_done = experiment.is_done(trial)
        results[place] = experiment.run(trial)
        if not was_done:
            done += 1
            left_s = (time.monotonic() - started) / done * (missing - done)
            progress(f"{done} of {missing} done, about {left_s / 60:.0f} min left")
    return {
        label: {
            arm.name: Cell(
                tuple(results[label, arm.name, repeat] for repeat in range(plan.repeats))
            )
            for arm in plan.arms
        }
        for label in loads
    }


def turn(arms: Sequence[Arm], repeat: int) -> Iterator[Arm]:
    """The arms in the order of a repeat: each comes first in turn, and every other is reversed."""
    first = repeat // 2 % len(arms)
    order = [*arms[first:], *arms[:first]]
    yield from reversed(order) if repeat % 2 else order


def _config(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    given = {name: value for name, value in vars(options).items() if name != "run"}
    resolved = {
        "repeats": plan.repeats,
        "reference": plan.reference.name,
        "flags": {arm.name: plan.setup.flags(arm) for arm in plan.arms},
        "workload": vars(plan.workload),
    }
    return {**json.loads(json.dumps(given, default=str)), **resolved}
