from __future__ import annotations

from rag_radix.policies import make_policy
from rag_radix.policies.base import Clock

from .nodes import used

POLICY = make_policy("gdsf", {})


def test_the_clock_and_the_uses_since_insertion():
    node = used(frequency=3, document_frequency=50)
    assert POLICY.priority(node, Clock(evicted=10.0)) == 13.0


def test_what_it_cost_behind_its_prefix_does_not_matter():
    assert POLICY.priority(used(cost=2.0), Clock()) == POLICY.priority(used(cost=1.0), Clock())


def test_a_once_popular_node_leaves_after_newcomers_have_pushed_the_clock_past_it():
    old = POLICY.priority(used(frequency=5), Clock())
    assert POLICY.priority(used(), Clock(evicted=3.0)) < old
    assert POLICY.priority(used(), Clock(evicted=5.0)) > old
