from __future__ import annotations

import pytest

from rag_radix.policies import make_policy
from rag_radix.policies.base import Clock

from .nodes import history_of, used

POLICY = make_policy("w-tinylfu", {})
SLRU = make_policy("slru", {})


def node(*times, tokens=100, **more):
    return used(frequency=len(times), last_access=times[-1], tokens=tokens, **more)


def test_leaves_are_ranked_as_by_slru():
    for statistics in (node(5), node(1, 3), node(1, 2, 3)):
        assert POLICY.priority(statistics, Clock(9)) == SLRU.priority(statistics, Clock(9))


def test_a_copy_must_have_been_used_more_than_what_it_displaces():
    hot, cold = node(1, 2, history=history_of(1, 2)), node(2, history=history_of(2))
    assert POLICY.admits([hot], [cold], Clock(3))
    assert not POLICY.admits([cold], [hot], Clock(3))
    assert not POLICY.admits([cold], [cold], Clock(3))


def test_uses_before_the_node_was_inserted_count():
    back = node(9, history=history_of(1, 2, 9))
    assert POLICY.admits([back], [node(8, 9, history=history_of(8, 9))], Clock(9))


@pytest.mark.parametrize(("age", "admitted"), [(49_000, False), (51_000, True)])
def test_uses_fade_by_half_in_50_000_retrievals(age, admitted):
    once_popular = node(1, 1, history=history_of(1, 1))
    new = node(1 + age, history=history_of(1 + age))
    assert POLICY.admits([new], [once_popular], Clock(1 + age)) == admitted


def test_all_victims_count_together_and_by_their_tokens():
    wanted = node(1, 2, 3, history=history_of(1, 2, 3), tokens=100)
    victim = node(3, history=history_of(3), tokens=100)
    assert POLICY.admits([wanted], [victim] * 2, Clock(3))
    assert not POLICY.admits([wanted], [victim] * 4, Clock(3))
    assert not POLICY.admits([wanted], [node(3, history=history_of(3), tokens=400)], Clock(3))


def test_what_hangs_below_a_node_and_would_go_with_it_counts_for_it():
    parent, child = node(1, history=history_of(1)), node(1, history=history_of(1))
    victim = node(1, history=history_of(1), tokens=150)
    assert not POLICY.admits([parent], [victim], Clock(1))
    assert POLICY.admits([parent, child], [victim], Clock(1))


def test_text_outside_documents_counts_the_uses_of_its_node():
    assert POLICY.admits([node(1, 2)], [node(2)], Clock(2))
