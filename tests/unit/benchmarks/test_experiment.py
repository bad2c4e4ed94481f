"""How a trial is measured, on servers that write down what is done to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from rag_radix_benchmarks.arms import STOCK_ARMS
from rag_radix_benchmarks.experiment import Experiment, turn
from rag_radix_benchmarks.facts import Counters
from rag_radix_benchmarks.sglang_server import SGLangServer
from rag_radix_benchmarks.trials import ClosedLoop, OpenLoop, TrialStore
from unit.benchmarks.comparison_data import SETUP, WORKLOAD, facts_of, result_of

LRU, HICACHE = STOCK_ARMS["stock-lru"], STOCK_ARMS["stock-hicache"]
PART = WORKLOAD.part(0)


@dataclass(frozen=True)
class Scripted(SGLangServer):
    """Answers at once and counts its own calls as the server's CPU time."""

    calls: list[tuple[str, object]] = field(default_factory=list)
    bodies: list[list[dict[str, object]]] = field(default_factory=list)

    def empty(self):
        self.calls.append(("empty", None))

    def vocabulary(self):
        return list(range(100))

    def counters(self):
        self.calls.append(("counters", None))
        return Counters({"choosing": float(len(self.calls))}, None, None)

    def closed_loop(self, bodies, concurrency):
        self.calls.append(("closed loop", concurrency))
        self.bodies.append(list(bodies))
        return result_of(LRU, 0.5).run

    def open_loop(self, bodies, due_s):
        self.calls.append(("open loop", tuple(due_s)))
        self.bodies.append(list(bodies))
        return result_of(LRU, 0.5).run


@dataclass
class OneServer:
    server: Scripted

    def of(self, arm):
        return self.server


@pytest.fixture
def server():
    return Scripted("http://here", facts_of(LRU))


@pytest.fixture
def experiment(server):
    arms = [LRU, HICACHE]
    return Experiment(SETUP, arms, WORKLOAD, OneServer(server), TrialStore(None), seed=0)


def test_a_run_empties_then_warms_then_counts_around_its_load(experiment, server):
    result = experiment.run(experiment.trial(LRU, OpenLoop(2.0), repeat=0))
    assert server.calls == [
        ("closed loop", 1),  # what is slow on its first use
        ("empty", None),
        ("closed loop", 2 * SETUP.running_requests),
        ("counters", None),
        ("open loop", tuple(PART.due_s(2.0))),
        ("counters", None),
    ]
    first_use, warm_up, measured = server.bodies
    assert [len(warm_up), len(measured)] == [WORKLOAD.warm_up, WORKLOAD.requests]
    assert first_use == measured[:2]
    assert result.scheduling_parts_s == {"choosing": 2.0}


def test_a_warm_up_generates_one_token_and_the_load_all(experiment, server):
    experiment.run(experiment.trial(LRU, ClosedLoop(3), repeat=0))
    asked = [{body["sampling_params"]["max_new_tokens"] for body in each} for each in server.bodies]
    assert asked == [{WORKLOAD.output_tokens}, {1}, {WORKLOAD.output_tokens}]
    assert [len(body["input_ids"]) for body in server.bodies[1]] == [
        request.prompt_tokens for request in PART.warm_up
    ]


def test_a_server_in_use_is_emptied_again_but_not_primed(experiment, server):
    for load in (OpenLoop(2.0), ClosedLoop(3)):
        server.calls.clear()
        experiment.run(experiment.trial(LRU, load, repeat=0))
    assert [name for name, _ in server.calls] == [
        *("empty", "closed loop", "counters", "closed loop", "counters")
    ]


def test_what_was_measured_is_not_measured_again(experiment, server):
    trial = experiment.trial(LRU, OpenLoop(2.0), repeat=0)
    first = experiment.run(trial)
    server.calls.clear()
    assert experiment.run(replace(trial)) is first
    assert server.calls == []


def test_a_capacity_is_that_of_a_server_that_is_never_idle(experiment, server):
    # Five requests in ten seconds.
    assert experiment.capacity(LRU, repeat=1) == pytest.approx(0.5)
    assert ("closed loop", 2 * SETUP.running_requests) == server.calls[-2]


def test_each_arm_comes_first_in_turn():
    arms = [LRU, HICACHE, STOCK_ARMS["no-cache"]]
    orders = [list(turn(arms, repeat)) for repeat in range(6)]
    assert {order[0].name for order in orders} == {arm.name for arm in arms}
    assert all(
        order == list(reversed(before))
        for before, order in zip(orders[::2], orders[1::2], strict=True)
    )
