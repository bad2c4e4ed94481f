"""The tier alone, over stand-ins for tree nodes: its victims are those of a full scan."""

from __future__ import annotations

import random

import pytest

from rag_radix.history import Kind, PathHistory, Topic
from rag_radix.policies import POLICIES, make_policy
from rag_radix.policies.adaptive import Adaptive
from rag_radix.policies.base import TierName
from rag_radix.statistics import NodeStatistics
from rag_radix.tiers import DuplicateTier, Tier

DEVICE = TierName.DEVICE


class Leaf:
    """What a tier reads of a node."""

    backuped = False

    def __init__(self, leaf_id, tokens, now):
        self.id = leaf_id
        self.key = range(tokens)
        self.statistics = NodeStatistics(last_access=now, inserted_at=now, tokens=tokens)
        self.ranks = [None] * len(TierName)
        self.offered = [None] * len(TierName)


class Leaves:
    """A tier with leaves that come, are used, locked, cut and evicted, like those of a tree.

    Attributes:
        tier: The tier.
        evictable: Leaves that may leave.
        locked: Those that may not.
    """

    def __init__(self, policy, seed):
        self.policy = policy
        self.random = random.Random(seed)
        self.evictable = {}
        self.locked = {}
        self.tier = Tier(DEVICE, policy, lambda leaf: leaf.id in self.evictable)
        self._now = 0
        self._ids = 0

    def advance(self):
        self._now += 1
        self.tier.clock.now = self._now
        self.tier.clock.reuse.advance(self._now)

    def insert(self, tokens):
        self._ids += 1
        leaf = Leaf(self._ids, tokens, self._now)
        if self.policy.uses_history:
            leaf.statistics.history = PathHistory(Topic())
        self.evictable[leaf.id] = leaf
        self.use(leaf)

    def use(self, leaf, uses=1):
        """Another use; `uses` for a document that was used elsewhere as well."""
        statistics, clock = leaf.statistics, self.tier.clock
        statistics.frequency += 1
        statistics.document_frequency = statistics.uses + uses - 1
        statistics.last_access = self._now
        statistics.add_cost(self.random.random(), 1 + self._now % 7)
        if statistics.history is not None:
            clock.reuse.use_topic(statistics.history.topic, self._now)
            clock.reuse.use(statistics.history, self._now, Kind.DOCUMENT)
        clock.observe(statistics)
        self.tier.rank(leaf)
        self.offer(leaf)

    def offer(self, leaf):
        if leaf.id in self.evictable:
            self.tier.offer(leaf)

    def lock(self, leaf):
        self.locked[leaf.id] = self.evictable.pop(leaf.id)

    def unlock(self, leaf):
        self.evictable[leaf.id] = self.locked.pop(leaf.id)
        self.offer(leaf)

    def cut(self, leaf):
        leaf.statistics.tokens = 1 + leaf.statistics.tokens // 2

    def flush(self):
        self.evictable.clear()
        self.locked.clear()
        self.tier.reset(self._now)

    def lowest(self):
        """The next victim, by a look at every leaf."""

        def order(leaf):
            rank = leaf.ranks[DEVICE]
            if rank.floor == rank.priority and rank.until > self._now:
                return rank.priority, leaf.id
            return self.policy.priority(leaf.statistics, self.tier.clock), leaf.id

        return min(self.evictable.values(), key=order, default=None)

    def evict(self):
        """The tier's victim; one in ten is declined and may be evicted later."""
        victim = self.tier.pop()
        if victim is not None:
            if self.random.random() < 0.9:
                del self.evictable[victim.id]
                self.tier.record_eviction(victim)
            else:
                self.offer(victim)
        return victim

    def pick(self, leaves, skew=2):
        """One of them; with a higher skew the old ones are picked more often."""
        ids = list(leaves)
        return leaves[ids[int(len(ids) * self.random.random() ** skew)]]


def agrees_with_scan(leaves, steps, capacity, check=None):
    """Let `steps` retrievals go by and compare every victim."""
    chance = leaves.random.random
    compared = 0
    for _ in range(steps):
        leaves.advance()
        leaves.insert(int(10 + 500 * chance() ** 3))
        if leaves.evictable and chance() < 0.7:
            jump = 40 if chance() < 0.01 else 1
            leaves.use(leaves.pick(leaves.evictable), jump)
        if leaves.evictable and chance() < 0.2:
            leaves.lock(leaves.pick(leaves.evictable))
        if leaves.locked and chance() < 0.2:
            locked = leaves.pick(leaves.locked)
            leaves.use(locked)
            leaves.unlock(locked)
        if leaves.evictable and chance() < 0.1:
            leaves.cut(leaves.pick(leaves.evictable))
        if chance() < 0.001:
            leaves.flush()
        while len(leaves.evictable) > capacity:
            expected = leaves.lowest()
            if check is not None:
                check(expected)
            assert leaves.evict() is expected
            compared += 1
    return compared


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_victims_are_those_of_a_full_scan(name):
    leaves = Leaves(make_policy(name, {}), seed=1)
    assert agrees_with_scan(leaves, steps=2000, capacity=80) > 1500


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "weights", [(0.5, 0.3, 0.2), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0.1, 0.1, 2)]
)
def test_victims_are_those_of_a_full_scan_while_the_order_changes(weights, seed):
    leaves = Leaves(Adaptive(*weights), seed)
    alpha, beta, gamma = weights

    def score(leaf):
        use, clock = leaf.statistics, leaves.tier.clock
        frequency = use.uses / clock.frequency_scale(clock.now)
        size = use.tokens / clock.largest_tokens
        return alpha * frequency + beta * use.last_access / clock.now - gamma * size

    def check(victim):
        assert score(victim) < min(map(score, leaves.evictable.values())) + 1e-12

    assert agrees_with_scan(leaves, steps=700, capacity=40, check=check) > 500


@pytest.mark.parametrize(("name", "changes"), [("adaptive", True), ("pgdsf", False)])
def test_refreshing_gives_the_priority_of_now_where_it_changes_with_time(name, changes):
    leaves = Leaves(make_policy(name, {}), seed=0)
    for _ in range(100):
        leaves.advance()
    leaves.insert(10)
    leaf = leaves.evictable[1]
    taken = leaf.ranks[DEVICE].priority
    leaves.advance()
    leaves.tier.clock.evicted = 1.0
    leaves.tier.refresh(leaf)
    now = leaves.policy.priority(leaf.statistics, leaves.tier.clock)
    assert now != taken
    assert leaf.ranks[DEVICE].priority == (now if changes else taken)


def test_equal_priorities_leave_by_id():
    leaves = Leaves(make_policy("lru", {}), seed=0)
    leaves.advance()
    for _ in range(5):
        leaves.insert(10)
    assert [leaves.tier.pop().id for _ in range(5)] == [1, 2, 3, 4, 5]
    assert leaves.tier.pop() is None


def test_a_victim_is_no_candidate_until_it_is_offered_again():
    leaves = Leaves(make_policy("lru", {}), seed=0)
    leaves.advance()
    leaves.insert(10)
    leaf = leaves.tier.pop()
    assert leaves.tier.pop() is None
    leaves.offer(leaf)
    assert leaves.tier.pop() is leaf


def test_the_clock_rises_to_the_highest_priority_evicted_and_counts():
    leaves = Leaves(make_policy("lru", {}), seed=0)
    for tokens in (10, 20):
        leaves.advance()
        leaves.insert(tokens)
    second, first = leaves.evictable[2], leaves.evictable[1]
    leaves.tier.record_eviction(second)
    leaves.tier.record_eviction(first)
    tier = leaves.tier
    assert (tier.clock.evicted, tier.evicted_nodes, tier.evicted_tokens) == (2.0, 2, 30)


class LookedAt:
    """Counts how often a tier or its policy looks at a leaf."""

    def __init__(self, leaves, monkeypatch):
        self.times = 0
        policy = type(leaves.policy)
        monkeypatch.setattr(leaves.tier, "_is_evictable", self._counting(leaves.tier._is_evictable))
        monkeypatch.setattr(policy, "rank", self._counting(policy.rank))

    def _counting(self, function):
        def counted(*args):
            self.times += 1
            return function(*args)

        return counted


@pytest.mark.parametrize(
    ("name", "waiting"), [*((name, 0) for name in POLICIES), ("pgdsf-plus", 9)]
)
@pytest.mark.parametrize("skew", [1, 3])
def test_few_leaves_are_looked_at_even_when_the_order_changes(name, waiting, skew, monkeypatch):
    capacity, retrievals = 1000, 500
    leaves = Leaves(make_policy(name, {}), seed=0)
    looked_at = LookedAt(leaves, monkeypatch)
    chance = leaves.random.random
    expected = []
    for step in range(6 * retrievals):
        if step == 5 * retrievals:
            looked_at.times = 0
        leaves.advance()
        leaves.insert(int(10 + 500 * chance() ** 3))
        leaves.use(leaves.pick(leaves.evictable, skew))
        for history in expected:
            history.expected = 0.0
        picked = [leaves.pick(leaves.evictable, skew) for _ in range(waiting)]
        expected = [leaf.statistics.history for leaf in picked]
        for history in expected:
            history.expected = 1 / waiting
        while len(leaves.evictable) > capacity:
            leaves.evict()
    assert looked_at.times / retrievals < 0.05 * capacity


def test_a_known_use_keeps_a_node_on_the_device_and_not_its_copy_on_host():
    policy = make_policy("pgdsf-plus", {})
    device = Tier(DEVICE, policy, lambda leaf: True)
    copies = DuplicateTier(TierName.DUPLICATE, policy, lambda leaf: True)
    often, once = (Leaf(number, tokens=10, now=0) for number in (1, 2))
    for leaf, uses in ((often, 3), (once, 1)):
        leaf.statistics.cost_per_token_s = leaf.statistics.cost_samples = 1
        history = leaf.statistics.history = PathHistory(Topic())
        for now in range(1, 1 + uses):
            history.topic.record(now)
            history.record(Kind.DOCUMENT)
        device.rank(leaf)
        copies.rank(leaf)
        copies.offer(leaf)
    once.statistics.history.expected = often.statistics.history.expected = 1.0
    assert copies.order(often) < copies.order(once)
    often.statistics.history.expected = 100.0
    assert copies.pop() is often
