from __future__ import annotations

import pytest

from rag_radix.policies import make_policy
from rag_radix.policies.base import Clock, TierName
from rag_radix.policies.pgdsf_plus import _until

from .nodes import history_of, used

POLICY = make_policy("pgdsf-plus", {})


def clock(now, tier=TierName.HOST):
    clock = Clock(now, tier=tier)
    clock.reuse.advance(now)
    return clock


def test_dearer_and_oftener_used_tokens_are_worth_more():
    node = used(cost=1.0, history=history_of(5))
    assert POLICY.priority(used(cost=2.0, history=history_of(5)), clock(9)) == pytest.approx(
        2 * POLICY.priority(node, clock(9))
    )
    often = used(cost=1.0, history=history_of(1, 3, 5))
    assert POLICY.priority(often, clock(9)) > POLICY.priority(node, clock(9))


def test_worth_falls_with_age_and_in_steps_only():
    node = used(history=history_of(10))
    worth = [POLICY.priority(node, Clock(10 + age)) for age in range(200)]
    assert worth == sorted(worth, reverse=True)
    steps = [age for age in range(1, 200) if worth[age] != worth[age - 1]]
    assert steps == [32, 45, 64, 90, 128, 181]


@pytest.mark.parametrize("age", [0, 1, 31, 32, 44, 45, 63, 64, 1_000, 123_456])
def test_a_rank_holds_until_the_next_step(age):
    until = _until(age)
    assert age < until <= max(32, 1.45 * age)
    assert _until(until - 1) == until
    rank = POLICY.rank(used(history=history_of(7)), clock(7 + age))
    assert rank.until == 7 + until
    assert rank.floor == rank.priority


def test_a_host_copy_makes_a_node_worth_its_load_on_the_device():
    with_copy = used(history=history_of(5), has_host_copy=True)
    without = used(history=history_of(5))
    on_device = clock(9, TierName.DEVICE)
    assert POLICY.priority(with_copy, on_device) < 0.05 * POLICY.priority(without, on_device)
    assert POLICY.priority(with_copy, clock(9)) == POLICY.priority(without, clock(9))


def test_a_known_use_of_what_is_on_host_as_well_is_worth_its_load_on_the_device():
    with_copy = used(history=history_of(5), has_host_copy=True)
    without = used(history=history_of(5))
    with_copy.history.expected = without.history.expected = 1
    on_device = clock(9, TierName.DEVICE)
    assert POLICY.foreseen(with_copy, on_device) < 0.05 * POLICY.foreseen(without, on_device)
    assert POLICY.foreseen(with_copy, clock(9)) == POLICY.foreseen(without, clock(9))


def test_a_copy_must_be_worth_more_than_all_that_it_displaces():
    wanted = used(history=history_of(1, 3, 5), tokens=100)
    victim = used(history=history_of(4), tokens=100)
    assert POLICY.admits([wanted], [], clock(9))
    assert POLICY.admits([wanted], [victim], clock(9))
    assert not POLICY.admits([victim], [wanted], clock(9))
    assert not POLICY.admits([victim], [victim], clock(9))
    assert not POLICY.admits([wanted], [victim] * 20, clock(9))
    # What hangs below is lost with it.
    assert POLICY.admits([victim, wanted], [wanted], clock(9))


def test_a_use_that_is_known_to_come_outweighs_none_that_is():
    waiting, other = used(history=history_of(1)), used(history=history_of(1, 3, 5))
    assert POLICY.foreseen(waiting, clock(900)) == 0.0
    waiting.history.expected = 1
    assert POLICY.foreseen(waiting, clock(900)) > POLICY.priority(other, clock(900))
    assert POLICY.admits([waiting], [other], clock(900))


def test_a_node_without_history_is_worth_nothing():
    assert POLICY.priority(used(), clock(9)) == 0.0
    assert POLICY.foreseen(used(), clock(9)) == 0.0
