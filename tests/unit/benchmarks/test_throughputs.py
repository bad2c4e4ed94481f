"""Both definitions of throughput, searched on arms whose times follow a formula."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from rag_radix_benchmarks.arms import STOCK_ARMS
from rag_radix_benchmarks.facts import WrongArmError
from rag_radix_benchmarks.throughputs import search_throughputs
from rag_radix_benchmarks.trials import Trial
from unit.benchmarks.comparison_data import SETUP, WORKLOAD, result_of

SERVICE_S = {"no-cache": 0.2, "stock-lru": 0.1, "stock-hicache": 0.05}
ARMS = [STOCK_ARMS[name] for name in SERVICE_S]


@dataclass
class Queues:
    """Takes the place of an `Experiment`: each arm is a queue with its own service time.

    Attributes:
        answers: By arm, where it isn't that of the others.
    """

    answers: dict[str, int] = field(default_factory=dict)

    def trial(self, arm, load, repeat):
        return Trial(SETUP, arm, WORKLOAD, load, repeat)

    def run(self, trial):
        service_s = SERVICE_S[trial.arm.name]
        load = min(trial.load.requests_per_s * service_s, 0.999)
        ttft_s = service_s * (1 + load / (2 * (1 - load)))
        result = result_of(trial.arm, ttft_s, answer=self.answers.get(trial.arm.name, 7))
        due_s = tuple(n / trial.load.requests_per_s for n in range(WORKLOAD.requests))
        return replace(result, run=replace(result.run, due_s=due_s))


def test_an_own_limit_gives_the_inverse_of_the_service_time_and_a_common_one_more():
    found = search_throughputs(Queues(), ARMS, ARMS[-1], lowest=0.02, repeats=2)
    report = found.as_json("stock-hicache")
    own, common = report["own_limit"], report["common_limit"]
    for arm, service_s in SERVICE_S.items():
        # Five times the service time is reached at 8/9 of what the server can do.
        assert own[arm]["requests_per_s"] == pytest.approx([8 / 9 / service_s] * 2, rel=0.1)
    assert own["stock-lru"]["reference_by_this"]["value"] == pytest.approx(2, rel=0.1)
    assert common["no-cache"]["requests_per_s"] == own["no-cache"]["requests_per_s"]
    # Under a second for all, 20 times its service time: at 38/39 of what it can do.
    assert common["stock-hicache"]["requests_per_s"] == pytest.approx([38 / 39 * 20] * 2, rel=0.1)
    assert common["stock-hicache"]["limit_s"] == own["no-cache"]["limit_s"]


def test_without_an_arm_without_a_cache_there_is_no_common_limit():
    found = search_throughputs(Queues(), ARMS[1:], ARMS[-1], lowest=0.02, repeats=1)
    assert found.as_json("stock-hicache")["common_limit"] is None


def test_an_arm_that_answers_from_another_model_is_refused():
    with pytest.raises(WrongArmError, match="stock-lru and stock-hicache answer 10 of 10"):
        search_throughputs(Queues({"stock-lru": 9}), ARMS, ARMS[-1], lowest=0.02, repeats=2)
