from __future__ import annotations

import pytest

from rag_radix.policies import make_policy
from rag_radix.policies.base import Clock

from .nodes import used


def test_the_papers_formula():
    statistics = used(frequency=3, cost=0.5 + 0.7, samples=2)
    priority = make_policy("pgdsf", {}).priority(statistics, Clock(evicted=10.0))
    assert priority == pytest.approx(10 + 3 * 0.6)


def test_frequency_of_the_document_or_of_the_place():
    statistics = used(frequency=1, document_frequency=9, cost=1.0)
    by = {f: make_policy("pgdsf", {"frequency": f}) for f in ("document", "node")}
    assert by["document"].priority(statistics, Clock()) == 9.0
    assert by["node"].priority(statistics, Clock()) == 1.0


def test_a_shared_head_counts_all_who_read_it():
    statistics = used(frequency=5, document_frequency=2, cost=1.0)
    assert make_policy("pgdsf", {}).priority(statistics, Clock()) == 5.0


def test_a_dearer_token_stays_longer():
    policy = make_policy("pgdsf", {})
    assert policy.priority(used(cost=2.0), Clock()) > policy.priority(used(cost=1.0), Clock())
