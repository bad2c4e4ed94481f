"""What leaves which tier, what is copied, and that nothing leaks."""

from __future__ import annotations

from itertools import pairwise

from tree_harness import harness
from unit.tree.prompts import SYSTEM, document, prompt

from rag_radix.policies.base import Rank, TierName


def swapped_out(h):
    return h.tree.tree_core.swapped_out_tokens


def test_a_document_is_copied_on_its_first_eviction_only():
    with harness(device_tokens=130, host_tokens=1300) as h:
        for _ in range(4):
            for names in (("a", "b"), ("c", "d")):
                h.serve(*prompt(*names))
        assert h.tree.component.device.evicted_tokens > swapped_out(h)
        assert max(n.host_copies for n in h.nodes()) == 1
        assert 0 < swapped_out(h) <= 4 * 40 + 20
        assert h.tree.counters.host_hit_documents > 0


def test_a_tail_is_dropped_and_one_that_was_used_again_is_copied():
    with harness(device_tokens=130, host_tokens=1300) as h:
        tokens, spans = prompt("a")
        h.serve(tokens, spans)
        h.serve(*prompt("b", "c"))
        assert h.tree.counters.dropped_tail_nodes > 0
        assert not any(n.is_tail and n.backuped for n in h.nodes())

    with harness(device_tokens=130, host_tokens=1300) as h:
        history = [*tokens, 9_000_001, 9_000_002, 9_000_003]
        h.serve(tokens, spans, output=history[-3:])
        h.serve([*history, *document("turn two", 5)], spans)
        h.serve(*prompt("b", "c"))
        h.serve(*prompt("d", "e"))
        kept = [n for n in h.nodes() if n.is_tail and n.backuped]
        assert kept
        assert all(n.matched for n in kept)
        req = h.serve([*history, *document("turn three", 5)], spans)
        assert req.cached_tokens_host + req.cached_tokens_device >= len(history) - 1


def test_without_a_host_tier_victims_are_dropped():
    with harness(device_tokens=130) as h:
        for names in (("a", "b"), ("c", "d"), ("a", "b")):
            h.serve(*prompt(*names))
        assert swapped_out(h) == 0
        assert h.tree.report()["host"] is None


def test_the_host_tier_drops_its_lowest_priority_and_raises_its_own_clock():
    with harness(device_tokens=130, host_tokens=130) as h:
        for step in range(8):
            h.serve(*prompt(f"x{step}", f"y{step}"))
        host, device = h.tree.component.host, h.tree.component.device
        assert host.evicted_tokens > 0
        assert host.clock.evicted > 0
        assert host.clock.evicted != device.clock.evicted


def test_pgdsf_keeps_what_is_retrieved_often_and_lru_what_was_retrieved_last():
    survivors = {}
    for policy in ("pgdsf", "lru"):
        with harness(device_tokens=150, policy=policy) as h:
            for question in range(4):
                h.serve(*prompt("hot", question=question))
            h.serve(*prompt("cold"))
            h.serve(*prompt("new", question_tokens=40))
            survivors[policy] = {name for name in ("hot", "cold") if h.on_device(name)}
    assert survivors == {"pgdsf": {"hot"}, "lru": {"cold"}}


def test_a_node_enters_the_host_tier_at_that_tiers_clock():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    with harness(device_tokens=400, host_tokens=800) as h:
        h.serve(*prompt("a"))
        node, host = h.ends()["a"], h.tree.component.host
        host.clock.evicted = 5.0
        before = node.ranks[TierName.DEVICE].priority
        h.tree.evict(EvictParams(num_tokens=60))
        assert node.backuped
        assert node.ranks[TierName.HOST].priority == before + 5.0


def test_lru_goes_by_retrievals_and_what_was_only_inserted_counts_as_fresh():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    with harness(device_tokens=1000, policy="lru") as h:
        for name in "aba":
            h.serve([*document(name), 1], [(name, 0, 40)], output=())
        guess = h.request(document("c"), [("c", 0, 40)], speculative=True)
        h.admit(guess)
        h.compute(guess)
        h.publish(guess)
        h.finish(guess, aborted=True)
        h.serve(document("d"), [("d", 0, 40)], output=())
        left = []
        while leaving := h.tree.evict(EvictParams(num_tokens=1)).num_tokens_evicted:
            left += [name for name in "abcd" if name not in left and not h.on_device(name)]
            assert leaving <= 40
        assert left == ["b", "a", "c", "d"]


def test_the_host_tier_frees_no_more_than_it_needs_and_nothing_that_is_on_the_device():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    with harness(device_tokens=400, host_tokens=800) as h:
        for name in "abc":
            h.serve([*document(name), 1], [(name, 0, 40)], output=())
        h.tree.evict(EvictParams(num_tokens=1000))
        h.serve([*document("a"), 2], [("a", 0, 40)], output=())  # loads it back
        assert h.tree.evict_host(30) == 40
        assert h.tree.evict_host(1000) == 40
        assert h.on_device("a")
        assert h.on_host("a")


def test_a_flush_sets_clocks_back_and_forgets_all_candidates():
    with harness(device_tokens=130, host_tokens=130) as h:
        for step in range(8):
            h.serve(*prompt(f"x{step}", f"y{step}"))
        h.tree.reset()
        h.allocator.clear()
        for tier in (h.tree.component.device, h.tree.component.host):
            assert (tier.clock.evicted, len(tier._heap)) == (0.0, 0)
        h.serve(*prompt("a"))


def test_a_victim_that_may_not_leave_is_passed_over_and_leaves_later():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    with harness(device_tokens=130, host_tokens=50) as h:
        h.serve([*document("a"), *document("b"), 1], [("a", 0, 40), ("b", 40, 80)], output=())
        h.tree.evict(EvictParams(num_tokens=41))
        parent, child = h.ends()["a"], h.ends()["b"]
        assert (parent.evicted, child.evicted) == (False, True)
        # A storage prefetch pins host copies; host has no room for the parent now.
        receipt = h.tree.inc_host_lock_ref(child.id).to_dec_params()
        assert h.tree.evict(EvictParams(num_tokens=1000)).num_tokens_evicted == 0
        h.check()
        h.tree.dec_host_lock_ref(child.id, receipt)
        assert h.tree.evict(EvictParams(num_tokens=1000)).num_tokens_evicted == 40
        h.check()


def test_clocks_never_fall_and_equal_the_highest_priority_evicted():
    with harness(device_tokens=130, host_tokens=260) as h:
        seen, clocks = [], []
        original = h.tree.component.device.record_eviction

        def record(node):
            seen.append(node.ranks[TierName.DEVICE].priority)
            original(node)
            clocks.append(h.tree.component.device.clock.evicted)

        h.tree.component.device.record_eviction = record
        for step in range(6):
            h.serve(*prompt(f"x{step}", "hot"))
        assert all(a <= b for a, b in pairwise(clocks))
        assert clocks[-1] == max(seen)


def test_equal_priorities_leave_in_the_order_of_their_ids():
    orders = []
    for _ in range(2):
        with harness(device_tokens=400) as h:
            for name in "abcdefgh":
                h.serve(SYSTEM + document(name, 20) + [1], [(name, 20, 40)], output=())
            for node in h.nodes():
                node.ranks[TierName.DEVICE] = Rank(1.0, 1.0)
                h.tree.tree_core.offer(node)
            taken = []
            while (node := h.tree.component.device.pop()) is not None:
                taken.append(node.id)
            assert taken == sorted(taken)
            orders.append([node_id - taken[0] for node_id in taken])
    assert orders[0] == orders[1]


def test_a_locked_document_stays_and_is_offered_again_when_unlocked():
    with harness(device_tokens=130, host_tokens=520) as h:
        held = h.request(*prompt("a"))
        h.admit(held)
        h.compute(held)
        h.publish(held)
        for step in range(3):
            h.serve(SYSTEM + document(f"x{step}", 20) + [1], [(f"x{step}", 20, 40)])
        assert h.on_device("a")
        h.finish(held)
        h.check()
        h.serve(*prompt("b", "c"))
        assert not h.on_device("a")


def test_the_heap_stays_in_proportion_to_the_leaves():
    with harness(device_tokens=5000) as h:
        for name in range(40):
            h.serve(*prompt(str(name)))
        for _ in range(60):
            for name in range(40):
                node = h.ends()[str(name)]
                node.statistics.frequency += 1
                h.tree.tree_core.rank(node)
        leaves = len(h.tree.tree_core.evictable_device_leaves)
        assert len(h.tree.component.device._heap) <= 128 + 2 * leaves + 2
        question = next(iter(h.tree.tree_core.evictable_device_leaves))
        question.statistics.frequency += 1
        question.statistics.add_cost(1.0, 1)
        h.tree.tree_core.rank(question)
        device, entries = TierName.DEVICE, len(h.tree.component.device._heap)
        assert question.offered[device] == question.ranks[device]
        h.tree.component.device.offer(question)
        assert len(h.tree.component.device._heap) == entries


def test_a_first_chunk_that_nothing_is_published_of_is_no_leak():
    with harness(device_tokens=320) as h:
        req = h.request(*prompt("a", "b"))
        h.admit(req)
        h.compute(req, 48)
        h.check()
        h.drop(req)
        h.check()
