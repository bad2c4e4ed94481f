"""Host slots pass from what leaves the host to what is copied there."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from tree_harness import harness
from unit.tree.prompts import document


def evict(h, tokens):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return h.tree.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted


@contextmanager
def full_host(**documents):
    """Documents "a" and "b" of 40 tokens fill the host, `documents` of so many tokens are on the
    device."""
    # SGLang adds a slot to what it is asked for.
    with harness(device_tokens=400, host_tokens=79, policy="lru") as h:
        serve(h, a=40, b=40)
        evict(h, 1000)
        assert pool(h).available_size() == 0
        serve(h, **documents)
        yield h


def serve(h, **documents):
    for name, tokens in documents.items():
        h.serve([*document(name, tokens), 1], [(name, 0, tokens)], output=())


def pool(h):
    return h.tree.cache_controller.mem_pool_host.anchor_entry.host_pool


def calls(h, monkeypatch):
    """The sizes of what the pool hands out and takes back from now on."""
    sizes = []
    alloc, free = pool(h).alloc, pool(h).free

    def counted_alloc(tokens):
        sizes.append(tokens)
        return alloc(tokens)

    def counted_free(slots):
        sizes.append(-len(slots))
        return free(slots)

    monkeypatch.setattr(pool(h), "alloc", counted_alloc)
    monkeypatch.setattr(pool(h), "free", counted_free)
    return sizes


def test_slots_of_what_leaves_go_to_what_comes_past_the_pool(monkeypatch):
    with full_host(c=40, d=40) as h:
        sizes = calls(h, monkeypatch)
        evict(h, 1000)
        assert [name for name in "abcd" if h.on_host(name)] == ["c", "d"]
        assert sizes == []
        h.check()
        for name in "cd":
            req = h.serve([*document(name), 2], [(name, 0, 40)], output=())
            assert req.cached_tokens_host == 40


def test_what_a_copy_does_not_need_is_kept_for_the_next_one(monkeypatch):
    with full_host(c=24) as h:
        sizes = calls(h, monkeypatch)
        evict(h, 1000)
        assert h.tree.swap_out.host_slots.kept_tokens == 16
        h.check()
        serve(h, d=16)
        evict(h, 1000)
        assert h.on_host("d")
        assert sizes == []
        h.tree.reset()
        assert pool(h).available_size() == 80
        h.check()


def test_a_pool_that_a_storage_backend_asks_too_gets_back_what_is_left(monkeypatch):
    with full_host(c=24) as h:
        sizes = calls(h, monkeypatch)
        h.tree.enable_storage = True
        monkeypatch.setattr(h.tree, "write_backup_storage", lambda node_id: None)
        evict(h, 1000)
        assert sizes == [-16]
        h.check()


def test_slots_that_are_missing_come_from_the_pool(monkeypatch):
    with harness(device_tokens=400, host_tokens=99, policy="lru") as h:
        serve(h, a=40, b=40)
        evict(h, 1000)
        serve(h, c=50)
        sizes = calls(h, monkeypatch)
        evict(h, 1000)
        assert sizes == [10]
        assert pool(h).available_size() == 10
        h.check()


def test_copies_ahead_of_eviction_leave_no_slots_behind():
    config = {"swap_out": "eager"}
    with harness(device_tokens=400, host_tokens=79, policy="lru", policy_config=config) as h:
        serve(h, a=40, b=40)
        evict(h, 1000)
        serve(h, c=24)
        assert [name for name in "abc" if h.on_host(name)] == ["b", "c"]
        assert h.tree.swap_out.host_slots.available_tokens == 16
        h.check()


def test_a_walk_that_fails_leaves_no_slots_behind(monkeypatch):
    with full_host(c=40, d=40) as h:

        def fails(*args):
            raise RuntimeError("no copy")

        monkeypatch.setattr(h.tree.tree_core, "begin_copy", fails)
        with pytest.raises(RuntimeError, match="no copy"):
            evict(h, 40)
        assert h.tree.swap_out.host_slots.available_tokens == 40


def test_a_flush_takes_promises_back():
    with harness(device_tokens=100, host_tokens=100) as h:
        host_slots = h.tree.swap_out.host_slots
        available = host_slots.available_tokens
        host_slots.promise(40)
        h.tree.reset()
        assert host_slots.available_tokens == available


def test_a_pool_that_places_slots_itself_is_asked_for_each_copy(monkeypatch):
    with full_host(c=40, d=40) as h:
        plain = type(pool(h))

        class Placing(plain):
            def alloc(self, need_size):
                return super().alloc(need_size)

        monkeypatch.setattr(pool(h), "__class__", Placing)
        sizes = calls(h, monkeypatch)
        evict(h, 1000)
        assert sizes == [-40, 40, -40, 40]
        h.check()
