"""Scheduling passes over the real tree, policy and prefill batch, without a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from tree_harness import Harness, harness
from unit.tree.prompts import prompt

from rag_radix.retrieval import Retrieval
from rag_radix.schedule_policy import install


class Passes:
    """A scheduler's passes: what `Scheduler.get_new_batch_prefill` does with its queue."""

    def __init__(
        self, h: Harness, *, schedule_policy: str = "fcfs", priorities: bool = False
    ) -> None:
        self.h = h
        self.scheduler = SimpleNamespace(
            schedule_policy=schedule_policy,
            policy=SchedulePolicy(schedule_policy, h.tree, False, priorities, False),
            chunked_req=None,
            result_queue=[],
        )
        install(self.scheduler)
        self.policy = self.scheduler.policy
        self.waiting: list[Any] = []

    def arrive(self, *names: str, question: int = 0, **request: Any) -> Any:
        priority = request.pop("priority", None)
        req = self.h.request(*prompt(*names, question=question), **request)
        req.priority = priority
        self.waiting.append(req)
        return req

    def adder(self, at_most: int = 9, chunk: int | None = None) -> Any:
        """What chooses a batch; the queue is in order then."""
        self.policy.calc_priority(self.waiting)
        return self.scheduler.get_prefill_adder_class()(
            self.h.page_size,
            self.h.tree,
            self.h.allocator,
            None,
            0.0,
            100_000,
            chunk,
            prefill_max_requests=at_most,
        )

    def begin(self, at_most: int = 9, chunk: int | None = None, skip: Sequence[Any] = ()) -> Any:
        """Choose a batch, which is then in flight; SGLang would pass over those to `skip`."""
        adder = self.adder(at_most, chunk)
        if (chunked := self.scheduler.chunked_req) is not None:
            chunked.init_next_round_input()
            self.scheduler.chunked_req = adder.add_chunked_req(chunked)
        for req in self.waiting:
            if req in skip:
                continue
            req.init_next_round_input(self.h.tree)
            result = adder.add_one_req(req, self.scheduler.chunked_req is not None, None)
            if result is not AddReqResult.CONTINUE:
                break
        batch = adder.can_run_list
        self.waiting = [req for req in self.waiting if req not in batch]
        if adder.new_chunked_req is not None:
            self.scheduler.chunked_req = adder.new_chunked_req
        for req in batch:
            if req.kv.req_pool_idx is None:
                self.h.tree.unlock(req.lock)
                self.h.start(req)
            self.h._extend(req, req.prefix_len, req.extend_end)
        return batch

    def end(self, batch: Sequence[Any]) -> None:
        """The results of a batch are in: what it computed is in the tree."""
        for req in batch:
            self.h.publish(req)
            if req is not self.scheduler.chunked_req:
                self.h.decode(req, 9_000_001)
                self.h.finish(req)
        self.h.check()

    def run(self, at_most: int = 9, **how: Any) -> Any:
        batch = self.begin(at_most, **how)
        self.end(batch)
        return batch


@contextmanager
def passes(
    *, device_tokens: int = 4_000, window: int = 32, scheduling: Any = None, **sizes: Any
) -> Iterator[Passes]:
    config = {"reorder_window": window}
    with harness(device_tokens=device_tokens, policy_config=config, **sizes) as h:
        yield Passes(h, **(scheduling or {}))


def computed(batch: Sequence[Any]) -> list[int]:
    return [req.extend_len for req in batch]


def test_what_reuses_most_is_served_first():
    with passes() as it:
        it.h.serve(*prompt("a", "b"))
        cold, half, warm = it.arrive("x", "y"), it.arrive("a", "y"), it.arrive("a", "b")
        assert [it.run(1) for _ in range(3)] == [[warm], [half], [cold]]


def test_the_queue_says_how_much_is_cached_as_admission_will_find_it():
    with passes(page_size=16) as it:
        it.h.serve(*prompt("a", "b"))
        req = it.arrive("a", "b", question=0)
        it.policy.calc_priority(it.waiting)
        assert it.policy.waiting_queue_prefix_matched(it.waiting)
        seen = req.num_matched_prefix_tokens
        req.init_next_round_input(it.h.tree)
        assert seen == req.prefix_len == 96


def test_host_hits_count_less_than_device_hits():
    with passes(device_tokens=300, host_tokens=600) as it:
        it.h.serve(*prompt("a", "b"))
        it.h.serve(range(10_000, 10_290))
        it.h.serve(*prompt("c", "d"))
        on_host, on_device = it.arrive("a", "b"), it.arrive("c", "d")
        it.policy.calc_priority(it.waiting)
        assert it.waiting == [on_device, on_host]
        assert on_host.num_matched_prefix_tokens >= 80


def test_only_prompts_that_a_change_concerns_are_looked_up_again():
    with passes() as it:
        it.h.serve(*prompt("a"))
        for name in "bcdefgh":
            it.arrive("a", name)
        it.run(1)
        walks = it.policy.report()["prefix_walks"]
        it.run(1)
        it.run(1)
        assert it.policy.report()["prefix_walks"] == walks


def test_a_document_that_two_requests_lack_is_computed_once():
    with passes() as it:
        first, second, other = it.arrive("a", "b"), it.arrive("a", "c"), it.arrive("d")
        assert it.run() == [first, other]
        (late,) = it.run()
        assert (late, late.cached_tokens_device) == (second, 60)
        assert it.policy.report()["held_requests"] == 1


@pytest.mark.parametrize("chained", [None, "storage", "events"])
def test_tenants_wait_for_each_other_where_they_find_each_others_documents(chained, monkeypatch):
    with passes() as it:
        if chained == "storage":  # hashes along a path, so the salt covers all of it
            monkeypatch.setattr(type(it.h.tree), "enable_storage", True)
        monkeypatch.setattr(it.h.tree.tree_core.kv_events, "enabled", chained == "events")
        one, other = (it.arrive("a", "b", cache_salt=salt, salt_from=1) for salt in "xy")
        if chained:
            assert it.begin() == [one, other]
        else:
            assert it.run() == [one]
            assert it.run() == [other]
            assert other.cached_tokens_device == 60


def test_a_request_waits_for_what_the_batch_in_flight_computes():
    with passes() as it:
        (first,) = batch = [it.arrive("a", "b")]
        assert it.begin() == batch
        second, other = it.arrive("a", "c"), it.arrive("d")
        in_flight = SimpleNamespace(forward_mode=ForwardMode.EXTEND, reqs=[first])
        it.scheduler.result_queue = [(in_flight, None)]
        assert it.begin() == [other]
        it.end(batch)
        it.scheduler.result_queue = []
        assert it.run() == [second]
        assert second.cached_tokens_device == 60


@pytest.mark.parametrize("why", ["decoding", "aborted", "not published"])
def test_nobody_waits_for_what_will_not_come(why):
    with passes() as it:
        first = it.arrive("a", "b")
        it.begin()
        batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, reqs=[first])
        if why == "decoding":
            batch.forward_mode = ForwardMode.DECODE
        elif why == "aborted":
            first.finished_reason = object()
        else:
            first.skip_radix_cache_insert = True
        it.scheduler.result_queue = [(batch, None)]
        second = it.arrive("a", "c")
        assert it.begin() == [second]


def test_a_request_waits_for_a_chunked_one_until_its_document_is_there():
    with passes() as it:
        long, short = it.arrive("a", "b", "c"), it.arrive("a", "d")
        assert it.run(chunk=40) == [long]  # up to the middle of "a"
        assert it.run(chunk=40) == [long]
        assert short in it.waiting
        assert it.run(chunk=200) == [long, short]
        assert (short.cached_tokens_device, it.scheduler.chunked_req) == (60, None)


def test_who_computes_first_may_be_passed_over_without_the_others_waiting_for_it():
    with passes() as it:
        first, second = it.arrive("a", "b"), it.arrive("a", "c")
        assert it.run(skip=[first]) == [second]


def test_a_held_request_is_computed_when_it_was_overtaken_as_often_as_allowed():
    with passes(window=2) as it:
        first = it.arrive("a", "b")
        batch = it.begin()
        in_flight = SimpleNamespace(forward_mode=ForwardMode.EXTEND, reqs=batch)
        it.scheduler.result_queue = [(in_flight, None)]
        held = it.arrive("a", "c")
        others = [it.arrive(name) for name in "defg"]
        assert it.begin() == [*others[:2], held, *others[2:]]
        assert held.cached_tokens_device == 0
        assert it.policy.report()["most_overtakings"] == 2
        it.end([first])


def test_the_batch_ends_where_a_passed_over_request_would_be_overtaken_too_often():
    with passes(window=2) as it:
        skipped = it.arrive("a")
        others = [it.arrive(name) for name in "bcde"]
        assert it.run(skip=[skipped]) == others[:2]
        assert it.run() == [skipped, *others[2:]]


def test_small_gaps_and_prompts_without_documents_are_not_waited_for():
    with passes() as it:
        tokens, _ = prompt("a")
        first, second = (it.h.request(tokens) for _ in range(2))
        it.waiting += [first, second]
        assert it.run() == [first, second]
        few = [it.h.request(range(30), [("s", 0, 25)]) for _ in range(2)]
        it.waiting += few
        assert it.run() == few


@pytest.mark.parametrize(
    "scheduling", [{}, {"schedule_policy": "lpm"}, {"priorities": True}], ids=str
)
@pytest.mark.parametrize("window", [0, 32])
def test_speculations_are_last_and_alone(window, scheduling):
    with passes(window=window, scheduling=scheduling) as it:
        it.h.serve(*prompt("a", "b"))
        guess = it.arrive("a", "b", speculative=True, priority=9)
        ordinary = it.arrive("c", priority=1)
        assert it.run() == [ordinary]
        assert it.run() == [guess]


def test_a_speculation_stays_while_an_ordinary_request_is_chunked():
    with passes() as it:
        long = it.arrive("a", "b")
        it.run(chunk=40)
        guess = it.arrive("c", speculative=True)
        assert it.run(chunk=400) == [long]
        assert it.run(chunk=400) == [guess]


def test_a_promoted_speculation_arrives_when_it_is_promoted():
    with passes(window=1) as it:
        guess = it.arrive("a", speculative=True)
        first, second = it.arrive("b"), it.arrive("c")
        assert it.run(1) == [first]
        Retrieval.of(guess, None).speculative = False
        assert it.run(1) == [second]
        assert it.run(1) == [guess]


def test_a_speculation_preempts_nobody(monkeypatch):
    monkeypatch.setattr(PrefillAdder, "preempt_to_schedule", lambda self, req: True)
    with passes(scheduling={"priorities": True}) as it:
        guess, ordinary = it.arrive("a", speculative=True, priority=9), it.arrive("b", priority=1)
        adder = it.adder()
        assert not adder.preempt_to_schedule(guess)
        assert adder.preempt_to_schedule(ordinary)


def test_who_waits_for_a_document_that_is_being_computed_preempts_nobody(monkeypatch):
    monkeypatch.setattr(PrefillAdder, "preempt_to_schedule", lambda self, req: True)
    with passes(window=2, scheduling={"priorities": True}) as it:
        it.arrive("a", "b", priority=1)
        in_flight = SimpleNamespace(forward_mode=ForwardMode.EXTEND, reqs=it.begin())
        it.scheduler.result_queue = [(in_flight, None)]
        held = it.arrive("a", "c", priority=1)
        others = [it.arrive(name, priority=1) for name in "def"]
        adder = it.adder()
        assert not adder.preempt_to_schedule(held)
        assert adder.preempt_to_schedule(others[0])
        assert it.policy.report()["held_requests"] == 0
        it.begin(2)
        assert it.adder().preempt_to_schedule(held)  # it has been overtaken as often as allowed


def test_who_would_overtake_another_too_often_preempts_nobody(monkeypatch):
    monkeypatch.setattr(PrefillAdder, "preempt_to_schedule", lambda self, req: True)
    with passes(window=2, scheduling={"priorities": True}) as it:
        skipped, *others = (it.arrive(name, priority=1) for name in "abcd")
        it.run(skip=[skipped])
        adder = it.adder()
        assert not adder.preempt_to_schedule(others[2])
        assert adder.preempt_to_schedule(skipped)


def test_priorities_come_before_reuse():
    with passes(scheduling={"priorities": True}) as it:
        it.h.serve(*prompt("a"))
        low, high = it.arrive("a", priority=1), it.arrive("b", priority=2)
        assert it.run() == [high, low]


def test_a_retracted_request_comes_back_with_its_output_and_as_a_new_one():
    with passes(window=1) as it:
        (req,) = batch = [it.arrive("a", "b")]
        it.begin()
        for each in batch:
            it.h.publish(each)
        for token in range(40):
            it.h.decode(req, 7_000 + token)
        it.h.drop(req)
        req.reset_for_retract()
        older = it.arrive("c")
        it.waiting.append(req)
        assert it.run(1) == [req]
        assert it.policy.report()["most_overtakings"] == 1
        assert it.run(1) == [older]


def test_who_is_aborted_while_waiting_leaves_nothing_behind():
    with passes() as it:
        for name in "bcd":
            it.arrive("a", name)
        it.policy.calc_priority(it.waiting)
        it.waiting.clear()
        it.policy.calc_priority(it.waiting)
        queue = it.policy.queue
        assert not any((queue._queued, queue.tracker._through, queue.tracker._waiting_for))


@pytest.mark.parametrize(
    ("policy", "window", "order", "said"),
    [
        ("fcfs", 32, "reuse", "most reused by computed first, overtaken 32 times at most"),
        ("fcfs", 0, "fcfs", "--schedule-policy fcfs, since reorder_window is 0"),
        ("lpm", 32, "lpm", "--schedule-policy lpm, as asked for"),
    ],
)
def test_the_log_and_the_report_say_what_is_in_charge(policy, window, order, said, caplog):
    caplog.set_level(logging.INFO, "rag_radix.schedule_policy")
    with passes(window=window, scheduling={"schedule_policy": policy}) as it:
        assert [record.message for record in caplog.records] == [
            f"Waiting queue: {said}; speculations last"
        ]
        report = json.loads(json.dumps(it.policy.report()))
        assert report["order"] == order


def test_without_reordering_the_queue_is_served_as_sglang_would():
    with passes(window=0) as it:
        it.h.serve(*prompt("b"))
        reqs = [it.arrive("a"), it.arrive("b"), it.arrive("a", "c")]
        assert it.run() == reqs
