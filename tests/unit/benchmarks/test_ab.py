"""Which loads a comparison puts on its arms, and what it calls them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import pytest
from rag_radix_benchmarks.ab import Capacities, _loads, _measure
from rag_radix_benchmarks.ab_options import Plan, add_options
from rag_radix_benchmarks.trials import OpenLoop, Trial
from unit.benchmarks.comparison_data import result_of


@dataclass
class Machine:
    """Takes the place of an `Experiment`: the requests of each repeat are as much work again."""

    plan: Plan
    asked: list[tuple[str, object, int]] = field(default_factory=list)

    def trial(self, arm, load, repeat):
        return Trial(self.plan.setup, arm, self.plan.workload, load, repeat)

    def run(self, trial):
        self.asked.append((trial.arm.name, trial.load, trial.repeat))
        return result_of(trial.arm, 0.5)

    def capacity(self, arm, repeat):
        self.asked.append((arm.name, "capacity", repeat))
        return 4.0 / (repeat + 1)


def machine(*arguments):
    parser = argparse.ArgumentParser()
    add_options(parser)
    arms = ["--arms", "stock-lru,stock-hicache"]
    return Machine(Plan.of(parser.parse_args(["--model-path", "some/model", *arms, *arguments])))


def test_a_share_is_of_the_capacity_on_the_requests_of_the_same_repeat():
    here = machine("--loads", "0.5,0.75", "--repeats", "2", "--capacity-of", "stock-hicache")
    capacities = Capacities(here)
    cells = _measure(here.plan, here, capacities)
    assert list(cells) == [
        "50% of the capacity of stock-hicache, 1.5 requests/s on average",
        "75% of the capacity of stock-hicache, 2.25 requests/s on average",
    ]
    assert capacities.as_json() == {"stock-hicache": [4.0, 2.0]}
    # Arms take turns, so that the second repeat begins with the other one.
    assert here.asked == [
        ("stock-hicache", "capacity", 0),
        ("stock-lru", OpenLoop(2.0), 0),
        ("stock-hicache", OpenLoop(2.0), 0),
        ("stock-lru", OpenLoop(3.0), 0),
        ("stock-hicache", OpenLoop(3.0), 0),
        ("stock-hicache", "capacity", 1),
        ("stock-hicache", OpenLoop(1.0), 1),
        ("stock-lru", OpenLoop(1.0), 1),
        ("stock-hicache", OpenLoop(1.5), 1),
        ("stock-lru", OpenLoop(1.5), 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "labels"),
    [
        (("--loads", "0.801,0.802,0.801"), ["80.1% of", "80.2% of"]),
        (("--rates", "1.001,1.002,1.001"), ["1.001 requests/s", "1.002 requests/s"]),
        (("--concurrency", "1,4"), ["1 at once", "4 at once"]),
    ],
)
def test_each_load_is_measured_once_under_a_name_of_its_own(arguments, labels):
    here = machine(*arguments, "--repeats", "1")
    found = list(_measure(here.plan, here, Capacities(here)))
    assert [label.partition(" the")[0] for label in found] == labels
    assert len(_loads(here.plan)) == len(labels)
