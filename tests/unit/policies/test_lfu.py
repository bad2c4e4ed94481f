from __future__ import annotations

from rag_radix.policies import make_policy
from rag_radix.policies.base import Clock

from .nodes import used


def order(*nodes):
    policy = make_policy("lfu", {})
    return sorted(range(len(nodes)), key=lambda i: policy.priority(nodes[i], Clock(10**9)))


def test_the_least_often_used_leaves_first_and_of_equals_the_one_used_longest_ago():
    nodes = [
        used(frequency=2, last_access=10**9 - 1),
        used(frequency=1, last_access=10**9),
        used(frequency=2, last_access=10**9 - 2),
    ]
    assert order(*nodes) == [1, 2, 0]


def test_uses_at_other_places_do_not_count():
    assert order(used(frequency=1, document_frequency=50), used(frequency=2)) == [0, 1]
