"""What is cached of a waiting prompt, found without touching the tree and only when needed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from tree_harness import Harness, harness
from unit.tree.prompts import prompt

from rag_radix.cached_prefix import CachedPrefix, PrefixTracker


@contextmanager
def tracked(**sizes: Any) -> Iterator[tuple[Harness, PrefixTracker]]:
    with harness(**{"device_tokens": 2_000, **sizes}) as h:
        core = h.tree.tree_core
        core.observer = tracker = PrefixTracker(core)
        yield h, tracker


def prefix_of(tokens: Sequence[int], page_size: int = 1) -> CachedPrefix:
    limit = (len(tokens) - 1) // page_size * page_size
    return CachedPrefix(RadixKey(array("q", tokens), limit=limit))


def found(tracker: PrefixTracker, prefix: CachedPrefix) -> tuple[int, int]:
    tracker.refresh(prefix)
    return prefix.device_tokens, prefix.host_tokens


@pytest.mark.parametrize("page_size", [1, 16])
def test_it_finds_what_sglangs_match_finds_and_changes_nothing(page_size):
    with tracked(page_size=page_size) as (h, tracker):
        h.serve(*prompt("a", "b"))
        h.serve(*prompt("a", "c"))
        before = [(n.id, len(n.key), n.last_access_time) for n in h.nodes()]
        for names in (("a", "b"), ("a", "d"), ("e",), ("a", "b", "c")):
            tokens, spans = prompt(*names, question=5)
            device, host = found(tracker, prefix_of(tokens, page_size))
            assert [(n.id, len(n.key), n.last_access_time) for n in h.nodes()] == before
            req = h.request(tokens, spans)
            req.init_next_round_input(h.tree)
            assert (device, host) == (req.prefix_len, req.host_hit_length)
            before = [(n.id, len(n.key), n.last_access_time) for n in h.nodes()]


def test_a_prompt_shorter_than_a_page_finds_nothing():
    with tracked(page_size=16) as (h, tracker):
        h.serve(*prompt("a"))
        assert found(tracker, prefix_of(prompt()[0][:9], 16)) == (0, 0)


def test_only_what_a_change_concerns_is_looked_up_again():
    with tracked() as (h, tracker):
        h.serve(*prompt("a"))
        mine, other = prefix_of(prompt("a", "b", "c")[0]), prefix_of(prompt("a", "d")[0])
        assert found(tracker, mine) == found(tracker, other) == (60, 0)
        walks = tracker.walks
        h.serve(*prompt("a", "e"))
        h.serve(*prompt("f"))
        assert (mine.is_current, other.is_current) == (True, True)
        h.serve(*prompt("a", "b"))
        assert (mine.is_current, other.is_current) == (False, True)
        assert (found(tracker, mine), found(tracker, other)) == ((100, 0), (60, 0))
        assert tracker.walks == walks + 1


def test_a_prompt_that_ends_inside_a_node_sees_it_cut_and_continued():
    with tracked() as (h, tracker):
        tokens = prompt("a")[0]
        h.serve(tokens)  # one node, without documents
        mine = prefix_of([*tokens[:50], 7, 8, 9])
        assert found(tracker, mine) == (50, 0)
        h.serve([*tokens[:50], 7, 8, 10])
        assert found(tracker, mine) == (52, 0)


def test_a_cut_above_leaves_it_current_and_is_seen_when_that_part_leaves():
    with tracked(device_tokens=200, host_tokens=400) as (h, tracker):
        tokens = prompt("a")[0]
        h.serve(tokens)
        mine = prefix_of([*tokens, 1, 2])
        assert found(tracker, mine) == (len(tokens), 0)
        h.serve([*tokens[:30], 5, 6])
        assert mine.is_current
        h.serve(range(10_000, 10_170))  # takes the whole device tier
        device, host = found(tracker, mine)
        assert (device, host) == (0, 30)  # the rest was a tail, which isn't copied


def test_demotion_load_back_and_removal_are_seen():
    with tracked(device_tokens=200, host_tokens=160) as (h, tracker):
        mine = prefix_of(prompt("a", "b", question=3)[0])
        h.serve(*prompt("a", "b"))
        assert found(tracker, mine) == (100, 0)
        h.serve(range(10_000, 10_190))
        assert found(tracker, mine) == (0, 100)
        h.serve(*prompt("a", "b"))
        assert found(tracker, mine) == (100, 0)
        h.serve(range(20_000, 20_190))
        h.tree.evict_host(160)
        assert found(tracker, mine) == (0, 0)


def test_a_cut_on_host_is_seen_when_only_its_upper_part_is_loaded():
    with tracked(device_tokens=200, host_tokens=160) as (h, tracker):
        tokens, spans = prompt("a", "b")
        mine = prefix_of(tokens)
        h.serve(tokens, spans)
        h.serve(range(10_000, 10_190))
        assert found(tracker, mine) == (0, 100)
        h.serve([*tokens[:50], 1, 2, 3])
        assert found(tracker, mine) == (50, 50)


def test_a_flush_and_a_namespace_are_seen():
    with tracked() as (h, tracker):
        tokens, spans = prompt("a")
        mine = CachedPrefix(RadixKey(array("q", tokens), "tenant", limit=len(tokens) - 1))
        h.serve(tokens, spans)
        assert found(tracker, mine) == (0, 0)
        h.serve(tokens, spans, extra_key="tenant")
        assert found(tracker, mine) == (len(tokens) - 1, 0)
        h.tree.reset()
        h.allocator.clear()
        assert found(tracker, mine) == (0, 0)
        h.serve(tokens, spans, extra_key="tenant")
        assert found(tracker, mine) == (len(tokens) - 1, 0)


def test_what_is_forgotten_leaves_nothing_behind():
    with tracked() as (h, tracker):
        h.serve(*prompt("a", "b"))
        prefixes = [prefix_of(prompt("a", name)[0]) for name in "bcd"]
        for prefix in prefixes:
            tracker.refresh(prefix)
        h.serve(*prompt("a", "c"))
        for prefix in prefixes:
            tracker.forget(prefix)
        assert not tracker._through
        assert not tracker._waiting_for
