"""What every registered policy promises; a new one is tested by being registered."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_radix.errors import ConfigError
from rag_radix.history import PathHistory, ReuseModel, Topic
from rag_radix.policies import POLICIES, ReplacementPolicy, make_policy
from rag_radix.policies.base import Clock
from rag_radix.statistics import NodeStatistics

from .nodes import history_of, use, used

pytestmark = pytest.mark.parametrize("name", sorted(POLICIES))
often = settings(max_examples=30, deadline=None)

counts = st.integers(0, 10) | st.integers(0, 10**6)
# What a clock sees of other nodes.
others = st.builds(NodeStatistics, counts, tokens=st.integers(1, 10**5))


@st.composite
def moments(draw):
    """A node's statistics, and a clock that has seen it and another."""
    now = draw(st.integers(1, 100) | st.integers(1, 10**6))
    last_access = draw(st.integers(0, now))
    uses = draw(st.integers(0, 3)) if last_access else 0
    node = NodeStatistics(
        frequency=draw(counts),
        document_frequency=draw(counts),
        cost_per_token_s=draw(st.floats(0, 1e3)),
        cost_samples=draw(st.integers(0, 3)),
        last_access=last_access,
        inserted_at=last_access // 2,
        tokens=draw(st.integers(1, 10**4)),
        history=history_of(*(max(1, last_access * i // uses) for i in range(1, uses + 1)))
        if uses
        else None,
    )
    clock = Clock(now, draw(st.just(0.0) | st.floats(0, 1e6)))
    clock.observe(node)
    clock.observe(draw(others))
    return node, clock


def test_it_is_a_frozen_dataclass_in_a_file_of_its_name(name):
    policy = make_policy(name, {})
    assert policy.name == name
    assert isinstance(policy, ReplacementPolicy)
    assert is_dataclass(policy)
    assert type(policy).__dataclass_params__.frozen
    assert type(policy).__module__ == f"rag_radix.policies.{name.replace('-', '_')}"
    assert policy.__doc__


@often
@given(moment=moments())
def test_asking_changes_nothing_and_the_answer_is_a_number(name, moment):
    policy, (node, clock) = make_policy(name, {}), moment
    before = copy.deepcopy((node, clock))
    ranks = {policy.rank(node, clock) for _ in range(2)}
    assert len({policy.admits([node], [node], clock) for _ in range(2)}) == 1
    assert policy.priority(node, clock) == (rank := ranks.pop()).priority
    assert not ranks
    assert math.isfinite(rank.priority)
    assert math.isfinite(rank.floor)
    after = (node, clock)
    for mine, theirs in zip(before, after, strict=True):
        for field in fields(mine):
            assert _plain(getattr(mine, field.name)) == _plain(getattr(theirs, field.name))


def _plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, ReuseModel):
        return {name: _plain(part) for name, part in vars(value).items()}
    if isinstance(value, PathHistory | Topic):
        return {name: _plain(getattr(value, name)) for name in value.__slots__}
    return value


@often
@given(moment=moments(), data=st.data())
def test_an_unused_node_stays_above_its_floor_while_its_rank_holds(name, moment, data):
    policy, (node, clock) = make_policy(name, {}), moment
    rank = policy.rank(node, clock)
    assert rank.floor <= rank.priority
    assert rank.until > clock.now
    clock.observe(data.draw(others))
    for _ in range(2):
        last = int(min(rank.until - 1, clock.now + 10**6))
        if clock.now < last:
            clock.now = data.draw(st.integers(clock.now + 1, last) | st.just(last))
        clock.evicted += data.draw(st.floats(0, 1e3))
        clock.observe(data.draw(others))
        assert policy.priority(node, clock) >= rank.floor


@often
@given(moment=moments(), other=others)
def test_only_who_says_so_measures_a_node_by_the_largest(name, moment, other):
    policy, (node, clock) = make_policy(name, {}), moment
    before = policy.rank(node, clock)
    clock.observe(other)
    if not policy.uses_largest:
        assert policy.rank(node, clock) == before


@often
@given(moment=moments())
def test_a_use_never_lowers_a_node(name, moment):
    policy, (node, clock) = make_policy(name, {}), moment
    before = policy.priority(node, clock)
    node.frequency += 1
    node.document_frequency += 1
    node.last_access = clock.now
    if node.history is not None:
        use(node.history, clock.now)
    clock.observe(node)
    assert policy.priority(node, clock) >= before


def test_a_node_never_used_ranks_no_higher_than_one_that_was(name):
    policy = make_policy(name, {})
    clock = Clock(2, 2.0)
    never = NodeStatistics(tokens=100)
    once = used(last_access=1, history=history_of(1))
    assert policy.priority(never, clock) <= policy.priority(once, clock)


def test_a_copy_that_displaces_nothing_is_admitted(name):
    assert make_policy(name, {}).admits([NodeStatistics()], [], Clock(1))


def test_an_unknown_setting_is_refused_with_the_known_ones(name):
    known = [field.name for field in fields(POLICIES[name])]
    listed = ", ".join(known) or "none"
    with pytest.raises(ConfigError, match=f"'nonsense'.*'{name}'.*settings are {listed}"):
        make_policy(name, {"nonsense": 1})


def test_a_setting_of_the_wrong_kind_is_refused_with_its_value(name):
    for field in fields(POLICIES[name]):
        for wrong in ("?", None, float("nan")):
            complaint = f"{field.name}={wrong!r} in --radix-eviction-policy-config: "
            with pytest.raises(ConfigError, match=re.escape(complaint)):
                make_policy(name, {field.name: wrong})
