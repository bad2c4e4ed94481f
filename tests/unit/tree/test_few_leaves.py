"""An eviction from the real tree looks at few of its leaves, however many there are."""

from __future__ import annotations

import random

import pytest

from rag_radix.policies import POLICIES
from rag_radix.replay.driver import knowledge_tree_replayer
from rag_radix.replay.reference_cost import a10g_mistral_cost_table
from rag_radix.replay.trace import TraceDocument, TraceRequest

PROMPT = 41  # a document, and a token of a question
EVICTING = 200


class Unscanned(set):
    """Leaves that may be asked for one by one only."""

    def __iter__(self):
        raise AssertionError("all leaves are looked at")


def looked_at(policy, leaves, queue, monkeypatch):
    """How often a request lets a tier or the policy look at a leaf of a tree of so many, when
    every other one asks for a new document and the host is as full as the device."""
    choose = random.Random(0).randrange
    later = [index if index % 2 else choose(index) for index in range(2 * leaves, 3 * leaves)]
    documents = [*range(2 * leaves), *later[: 2 * EVICTING]]
    requests = [
        TraceRequest(0.0, (TraceDocument(str(each), "", 0, PROMPT - 1),), PROMPT, 1)
        for each in documents
    ]
    times = 0

    def counting(function):
        def counted(*args):
            nonlocal times
            times += 1
            return function(*args)

        return counted

    with knowledge_tree_replayer(
        policy,
        {},
        device_tokens=PROMPT * leaves,
        host_tokens=PROMPT * leaves,
        longest_request_tokens=PROMPT,
        cost=a10g_mistral_cost_table(),
        page_size=1,
    ) as it:
        core, component, kind = it.tree.tree_core, it.tree.component, POLICIES[policy]
        outcomes = it.run(requests, queue)
        for _ in requests[:-EVICTING]:
            next(outcomes)
        sets = "evictable_device_leaves", "evictable_host_leaves"
        for name in sets:
            setattr(core, name, Unscanned(getattr(core, name)))
        evicted = component.device.evicted_nodes
        with monkeypatch.context() as patches:
            patches.setattr(kind, "rank", counting(kind.rank))
            for tier in component.tiers:
                patches.setattr(tier, "_is_evictable", counting(tier._is_evictable))
            assert len(list(outcomes)) == EVICTING
        assert component.device.evicted_nodes >= evicted + EVICTING
        for name in sets:
            setattr(core, name, set(set.__iter__(getattr(core, name))))
        it.tree.check_integrity()
    return times / EVICTING


@pytest.mark.parametrize(("policy", "queue"), [("pgdsf", 0), ("adaptive", 0), ("pgdsf-plus", 20)])
def test_ten_times_as_many_leaves_are_looked_at_hardly_more_often(policy, queue, monkeypatch):
    few, many = (looked_at(policy, leaves, queue, monkeypatch) for leaves in (200, 2000))
    assert many < few + 20  # that a heap is rebuilt now and then included
    assert many < 150
