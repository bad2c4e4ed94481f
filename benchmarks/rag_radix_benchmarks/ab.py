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
from collections.abc import Mapping
from typing import Any

from rag_radix_benchmarks.ab_options import Plan, add_options
from rag_radix_benchmarks.answers import check_same_model
from rag_radix_benchmarks.charts import check_plottable
from rag_radix_benchmarks.experiment import Experiment, turn
from rag_radix_benchmarks.figures import environment
from rag_radix_benchmarks.limits import Limits, prefill_cost
from rag_radix_benchmarks.progress import Remaining
from rag_radix_benchmarks.report import as_text, write
from rag_radix_benchmarks.results import Cell, Cells, Comparison, agreements, ratios
from rag_radix_benchmarks.servers import Servers
from rag_radix_benchmarks.throughputs import LOWEST_SHARE, search_throughputs
from rag_radix_benchmarks.trials import ClosedLoop, Load, OpenLoop, TrialResult, TrialStore

__all__ = ["add_options", "measure", "run"]


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    report = measure(options)
    print(as_text(report))
    if options.json:
        print(json.dumps(report))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The report, as plain values.

    Raises:
        ConfigError: One of the options is wrong.
        RagRadixError: An arm can't be measured, or isn't what it says.
    """
    plan = Plan.of(options)
    if options.report is not None:
        check_plottable()
    for folder in (options.out, options.report):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    cost = prefill_cost(plan.setup.model_path, options.cost_table)
    store = TrialStore(None if options.out is None else options.out / "runs.jsonl")
    with Servers(plan.setup, plan.servers, logs=options.out) as servers:
        experiment = Experiment(plan.setup, plan.arms, plan.workload, servers, store, options.seed)
        capacities = {}
        if plan.shares or options.throughput:
            capacities = {arm.name: experiment.capacity(arm) for arm in plan.capacity_of}
        cells = _measure(plan, experiment, _loads(plan, capacities))
        throughputs = None
        if options.throughput:
            lowest = LOWEST_SHARE * min(capacities.values())
            throughputs = search_throughputs(experiment, plan.arms, lowest, plan.repeats)
    repeats = len(next(iter(next(iter(cells.values())).values())).results)
    parts = [plan.workload.part(repeat) for repeat in range(repeats)]
    comparison = Comparison(cells, plan.reference.name, parts, Limits.of(parts, plan.setup, cost))
    report = {
        "benchmark": "ab",
        **comparison.as_json(),
        "capacity_requests_per_s": capacities,
        "throughput": throughputs and throughputs.as_json(plan.reference.name),
        **environment(),
        "config": {**_config(options, plan), "repeats": repeats},
        "command": sys.argv[1:],
    }
    if options.report is not None:
        write(report, options.report)
    return report


def _loads(plan: Plan, capacities: Mapping[str, float]) -> dict[str, Load]:
    """The loads by their labels."""
    loads: dict[str, Load] = {}
    for arm, capacity in capacities.items():
        for share in plan.shares:
            rate = share * capacity
            label = f"{share:.0%} of the capacity of {arm}, {rate:.3g} requests/s"
            loads[label] = OpenLoop(rate)
    each: list[Load] = [*map(OpenLoop, plan.rates), *map(ClosedLoop, plan.concurrencies)]
    return loads | {str(load): load for load in each}


def _measure(plan: Plan, experiment: Experiment, loads: dict[str, Load]) -> Cells:
    """All loads and arms, repeated as often as asked for or until the intervals are narrow.

    Raises:
        WrongArmError: An arm answers as another model would.
    """
    results: dict[str, dict[str, list[TrialResult]]] = {
        label: {arm.name: [] for arm in plan.arms} for label in loads
    }
    remaining = Remaining(plan.repeats * len(loads) * len(plan.arms))
    for repeat in range(plan.most_repeats):
        for label, load in loads.items():
            for arm in turn(plan.arms, repeat):
                with remaining.one():
                    trial = experiment.trial(arm, load, repeat)
                    results[label][arm.name].append(experiment.run(trial))
        cells = {
            label: {arm: Cell(tuple(of_arm)) for arm, of_arm in by_arm.items()}
            for label, by_arm in results.items()
        }
        check_same_model(plan.reference.name, agreements(cells, plan.reference.name))
        if repeat + 1 >= plan.repeats and is_precise(cells, plan.reference.name, plan.precision):
            break
    return cells


def is_precise(cells: Cells, reference: str, precision: float | None) -> bool:
    """Whether every ratio of mean TTFT is known to within a part of itself, if that is asked."""
    if precision is None:
        return True
    found = [
        ratios(cell, by_arm[reference])["mean_ttft"]
        for by_arm in cells.values()
        for arm, cell in by_arm.items()
        if arm != reference
    ]
    return all(
        each["low"] is not None and each["high"] / each["value"] <= 1 + precision for each in found
    )


def _config(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    given = {name: value for name, value in vars(options).items() if name != "run"}
    resolved = {
        "reference": plan.reference.name,
        "flags": {arm.name: plan.setup.flags(arm) for arm in plan.arms},
        "workload": vars(plan.workload),
    }
    return {**json.loads(json.dumps(given, default=str)), **resolved}
