"""`rag-radix bench ab`: what the knowledge tree gains over stock SGLang, here.

Each arm is a real server; all have the same model, attention, memory and requests, and differ in
the cache alone, which each server is asked for before anything is believed of it. In each repeat
the arms take turns, in changing order. A run empties the cache, fills it with requests that aren't
measured and then measures. A load by capacity is one by the arm's capacity on the requests of the
same repeat. A ratio is an arm over the reference: above 1, the reference is faster;
its interval is a 95% confidence interval over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from rag_radix_benchmarks.ab_options import Plan, add_options
from rag_radix_benchmarks.answers import Agreement, check_same_model
from rag_radix_benchmarks.arms import Arm
from rag_radix_benchmarks.charts import check_plottable
from rag_radix_benchmarks.experiment import Experiment, turn
from rag_radix_benchmarks.figures import environment
from rag_radix_benchmarks.limits import Limits, prefill_cost
from rag_radix_benchmarks.progress import Remaining
from rag_radix_benchmarks.report import as_text, write
from rag_radix_benchmarks.results import (
    LATE_SHARE_LIMIT,
    Cell,
    Cells,
    Comparison,
    agreements,
    ratios,
)
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
        capacities = Capacities(experiment)
        cells = _measure(plan, experiment, capacities)
        throughputs = None
        if options.throughput:
            lowest = LOWEST_SHARE * min(capacities.of(arm, 0) for arm in plan.capacity_of)
            throughputs = search_throughputs(
                experiment, plan.arms, plan.reference, lowest, plan.repeats
            )
    repeats = len(next(iter(next(iter(cells.values())).values())).results)
    parts = [plan.workload.part(repeat) for repeat in range(repeats)]
    comparison = Comparison(cells, plan.reference.name, parts, Limits.of(parts, plan.setup, cost))
    figures = comparison.as_json()
    if throughputs is not None:
        figures["client_kept_up"] &= throughputs.client_late_share <= LATE_SHARE_LIMIT
    report = {
        "benchmark": "ab",
        **figures,
        "capacity_requests_per_s": capacities.as_json(),
        "throughput": throughputs and throughputs.as_json(plan.reference.name),
        **environment(),
        "config": {**_config(options, plan), "repeats": repeats},
        "command": sys.argv[1:],
    }
    if options.report is not None:
        write(report, options.report)
    return report


class Capacities:
    """Capacities of arms on the requests of each repeat, measured when first asked for.

    Args:
        experiment: Measures them.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._found: dict[str, dict[int, float]] = {}

    def of(self, arm: Arm, repeat: int) -> float:
        """Requests a second."""
        found = self._found.setdefault(arm.name, {})
        if repeat not in found:
            found[repeat] = self._experiment.capacity(arm, repeat)
        return found[repeat]

    def mean(self, arm: Arm) -> float:
        """Over the repeats that were asked for."""
        return statistics.fmean(self._found[arm.name].values())

    def as_json(self) -> dict[str, list[float]]:
        """By arm and repeat."""
        return {arm: list(found.values()) for arm, found in self._found.items()}


@dataclass(frozen=True, slots=True)
class CapacityShare:
    """Arrivals by the capacity of an arm, which is another one in each repeat."""

    arm: Arm
    share: float

    def load(self, capacities: Capacities, repeat: int) -> Load:
        return OpenLoop(self.share * capacities.of(self.arm, repeat))

    def label(self, capacities: Capacities) -> str:
        rate = self.share * capacities.mean(self.arm)
        return (
            f"{100 * self.share:g}% of the capacity of {self.arm.name}, "
            f"{rate:.3g} requests/s on average"
        )


@dataclass(frozen=True, slots=True)
class SameLoad:
    """A load that is the same in each repeat."""

    same: Load

    def load(self, capacities: Capacities, repeat: int) -> Load:
        return self.same

    def label(self, capacities: Capacities) -> str:
        return str(self.same)


def _loads(plan: Plan) -> list[CapacityShare | SameLoad]:
    """Each once."""
    loads: list[CapacityShare | SameLoad] = [
        *(CapacityShare(arm, share) for arm in plan.capacity_of for share in plan.shares),
        *(SameLoad(OpenLoop(rate)) for rate in plan.rates),
        *(SameLoad(ClosedLoop(concurrency)) for concurrency in plan.concurrencies),
    ]
    return [load for place, load in enumerate(loads) if load not in loads[:place]]


def _measure(plan: Plan, experiment: Experiment, capacities: Capacities) -> Cells:
    """All loads and arms, repeated as often as asked for or until the intervals are narrow.

    Raises:
        WrongArmError: An arm answers as another model would.
    """
    loads = _loads(plan)
    results: list[dict[str, list[TrialResult]]] = [
        {arm.name: [] for arm in plan.arms} for _ in loads
    ]
    capacity_of = plan.capacity_of if plan.shares else ()
    remaining = Remaining(plan.repeats * (len(capacity_of) + len(loads) * len(plan.arms)))
    for repeat in range(plan.most_repeats):
        for arm in capacity_of:
            with remaining.one():
                capacities.of(arm, repeat)
        for asked, by_arm in zip(loads, results, strict=True):
            load = asked.load(capacities, repeat)
            for arm in turn(plan.arms, repeat):
                with remaining.one():
                    trial = experiment.trial(arm, load, repeat)
                    by_arm[arm.name].append(experiment.run(trial))
        cells = {
            asked.label(capacities): {
                arm.name: Cell(tuple(by_arm[arm.name]), in_order=arm.programs.order == "score")
                for arm in plan.arms
            }
            for asked, by_arm in zip(loads, results, strict=True)
        }
        check_same_model(plan.reference.name, _comparable_answers(plan, cells))
        if repeat + 1 >= plan.repeats and is_precise(cells, plan.reference.name, plan.precision):
            break
    return cells


def _comparable_answers(plan: Plan, cells: Cells) -> dict[str, Agreement]:
    """Agreements with the arms whose prompts have the documents in the reference's order."""
    found = agreements(cells, plan.reference.name)
    order = plan.reference.programs.order
    return {
        arm.name: found[arm.name]
        for arm in plan.arms
        if arm.name in found and arm.programs.order == order
    }


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
