from __future__ import annotations

from rag_radix.policies import make_policy
from rag_radix.policies.base import Clock

from .nodes import used


def test_only_the_last_access_counts():
    policy = make_policy("lru", {})
    assert policy.priority(used(frequency=99, last_access=3), Clock(evicted=100.0)) == 3.0
