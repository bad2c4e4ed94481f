from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_radix.policies import make_policy
from rag_radix.policies.adaptive import Adaptive
from rag_radix.policies.base import Clock

from .nodes import used


def clock_at(now, most_uses=1, largest_tokens=1):
    """A clock on which the largest frequency has come into force."""
    clock = Clock()
    clock.observe(used(most_uses, tokens=largest_tokens))
    clock.now = now
    return clock


def score(node, clock, **weights):
    return make_policy("adaptive", weights).priority(node, clock) / clock.now


def test_the_weights_are_those_of_the_article():
    node = used(frequency=5, last_access=60, tokens=400)
    clock = clock_at(100, most_uses=10, largest_tokens=1000)
    assert score(node, clock) == pytest.approx(0.5 * 5 / 10 + 0.3 * 60 / 100 - 0.2 * 400 / 1000)


def test_each_weight_is_a_setting():
    node = used(frequency=5, last_access=60, tokens=400)
    clock = clock_at(100, most_uses=10, largest_tokens=1000)
    assert score(node, clock, alpha=1, beta=0, gamma=0) == pytest.approx(0.5)
    assert score(node, clock, alpha=0, beta=1, gamma=0) == pytest.approx(0.6)
    assert score(node, clock, alpha=0, beta=0, gamma=1) == pytest.approx(-0.4)


@pytest.mark.parametrize("wrong", [-0.1, float("inf"), True, [0.5]])
def test_a_weight_is_a_number_of_at_least_zero(wrong):
    with pytest.raises(ValueError, match=r"gamma=.*give a number of at least 0"):
        make_policy("adaptive", {"gamma": wrong})


def test_a_larger_frequency_comes_into_force_with_notice():
    clock = clock_at(160, most_uses=10)
    clock.observe(used(frequency=50))
    assert clock.largest_frequency == 50
    assert [clock.frequency_scale(time) for time in (160, 169, 170)] == [10, 10, 50]
    # What comes meanwhile waits for its own turn.
    clock.now = 165
    clock.observe(used(frequency=90))
    assert clock.frequency_scale(170) == 50
    clock.now = 170
    clock.observe(used())
    assert [clock.frequency_scale(time) for time in (170, 179, 180)] == [50, 50, 90]


weight = st.sampled_from([0, 0.2, 0.5, 3.0])


@settings(max_examples=200, deadline=None)
@given(
    policy=st.builds(Adaptive, weight, weight, weight),
    now=st.integers(1, 10_000),
    uses=st.integers(0, 30),
    recency=st.floats(0, 1),
    tokens=st.integers(1, 2000),
    most_uses=st.integers(1, 30),
    evicted_share=st.floats(0, 1),
    seen=st.lists(st.integers(1, 10_000), max_size=4),
)
def test_the_floor_holds_at_every_moment_until_it_ends(
    policy, now, uses, recency, tokens, most_uses, evicted_share, seen
):
    clock = clock_at(now, most_uses, 1000)
    node = used(frequency=uses, last_access=int(now * recency), tokens=tokens)
    clock.observe(node)
    clock.evicted = max(0.0, evicted_share * policy.priority(node, clock))
    rank = policy.rank(node, clock)
    # The tier asks again for what has fallen to its floor.
    assert any(weight for weight in vars(policy).values()) == (rank.floor < rank.priority)
    while clock.now < rank.until:
        assert policy.priority(node, clock) >= rank.floor
        if seen:
            clock.observe(used(frequency=seen.pop(), tokens=seen[-1] if seen else 1))
            assert policy.priority(node, clock) >= rank.floor
        clock.now += 1


def test_a_rank_holds_the_longer_the_further_a_node_is_from_the_last_victims():
    clock = clock_at(10_000, most_uses=1000, largest_tokens=1000)
    policy = make_policy("adaptive", {})
    clock.evicted = policy.priority(used(last_access=5000, tokens=500), clock)
    holds = [
        policy.rank(used(last_access=last_access, tokens=500), clock).until - clock.now
        for last_access in (5000, 5200, 6000, 10_000)
    ]
    assert holds == sorted(holds)
    assert holds[0] < 20
    assert holds[-1] == clock.notice == 625
