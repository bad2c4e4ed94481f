from __future__ import annotations

from rag_radix.policies import make_policy
from rag_radix.policies.base import Clock

from .nodes import used

POLICY = make_policy("s3-fifo", {})


def passes(frequency, document_frequency=0, evicted=0.0):
    node = used(frequency=frequency, document_frequency=document_frequency)
    return POLICY.priority(node, Clock(evicted=evicted)) - evicted


def test_a_node_is_on_probation_until_its_second_hit():
    assert passes(frequency=1) == passes(frequency=2) < 1
    assert passes(frequency=3) > 1


def test_a_document_known_from_before_skips_probation():
    assert passes(frequency=1, document_frequency=1) < 1
    assert passes(frequency=1, document_frequency=2) == 1


def test_hits_buy_passes_up_to_three():
    assert [passes(f, f + 1) for f in (1, 2, 3, 4, 5, 100)] == [1, 2, 3, 4, 4, 4]


def test_nodes_of_one_pass_tie_so_that_the_first_in_is_the_first_out():
    # As often as the clock may have been pushed by probation.
    pushed = sum([passes(1)] * 8)
    assert passes(1, 2) == pushed
    assert passes(3, evicted=1e6) == passes(3)
