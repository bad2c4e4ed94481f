"""Whatever the host's locks are on, what counts as evictable can leave the device: SGLang admits
requests against it, and ends when their slots can't be had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tree_harness import Harness, harness
from unit.storage.stores import server
from unit.tree.prompts import DOCUMENT_TOKENS, SYSTEM, document, prompt

from rag_radix.control.pins import Pin
from rag_radix.control.selector import Selector
from rag_radix.storage import files as files_module


@contextmanager
def no_room_on_host(h: Harness) -> Iterator[None]:
    """Meanwhile something else has all slots of the host that are free now."""
    pool = h.tree.cache_controller.mem_pool_host
    taken = pool.alloc(pool.available_size())
    yield
    pool.free(taken)


def evict_all(h: Harness) -> None:
    evictable = h.tree.evictable_size()
    assert evictable > 0
    assert h.tree.evict(EvictParams(num_tokens=evictable)).num_tokens_evicted == evictable
    assert h.tree.evictable_size() == 0


@pytest.mark.parametrize("spans", [(), (("d", 0, 40),)], ids=["a tail", "a document"])
def test_a_leaf_that_a_prefetch_hangs_on_is_copied(spans):
    with harness(device_tokens=100, host_tokens=400) as h:
        h.serve(range(40), spans, output=())
        (leaf,) = h.nodes()
        receipt = h.tree.inc_host_lock_ref(leaf.id).to_dec_params()
        evict_all(h)
        assert leaf.backuped
        h.tree.dec_host_lock_ref(leaf.id, receipt)
        h.check()


def test_a_node_above_what_is_locked_is_copied_whatever_it_is_worth(monkeypatch):
    with harness(device_tokens=130, host_tokens=100) as h:
        h.serve([*document("a"), *document("b"), 1], [("a", 0, 40), ("b", 40, 80)], output=())
        h.tree.evict(EvictParams(num_tokens=41))
        above, below = h.ends()["a"], h.ends()["b"]
        assert (above.evicted, below.evicted) == (False, True)
        monkeypatch.setattr(h.tree.swap_out, "_is_choosy", True)
        monkeypatch.setattr(h.tree.swap_out, "_is_admitted", lambda node, victims: False)
        receipt = h.tree.inc_host_lock_ref(below.id).to_dec_params()
        evict_all(h)
        assert above.backuped
        h.tree.dec_host_lock_ref(below.id, receipt)
        h.check()


def test_a_prefetch_is_given_up_where_the_host_has_no_room_for_what_it_hangs_on(
    tmp_path, monkeypatch
):
    go_on, read = threading.Event(), files_module.read_pages

    def slow(*args):
        go_on.wait(20)
        return read(*args)

    with server(tmp_path) as first:
        first.ask(prompt("a"))
    monkeypatch.setattr(files_module, "read_pages", slow)
    with server(tmp_path) as second:
        second.h.serve(SYSTEM, output=())
        req = second.h.request(*prompt("a", question=1))
        second.begin(req)
        under_way, handle = second.tree.ongoing_prefetch, req.cache_request_handle
        second.wait(lambda: under_way[handle].host_indices is not None)
        with no_room_on_host(second.h):
            evict_all(second.h)
            assert not under_way
            go_on.set()
        assert second.tree.check_prefetch_progress(handle)
        assert second.ask(prompt("a", question=2)).from_storage >= DOCUMENT_TOKENS


def test_what_lies_above_a_write_to_storage_waits_for_its_end(tmp_path, monkeypatch):
    permits, write = threading.Semaphore(2), files_module.write_segment

    def slow(*args):
        permits.acquire(timeout=20)
        return write(*args)

    monkeypatch.setattr(files_module, "write_segment", slow)
    with server(tmp_path) as store:
        tree, core = store.tree, store.tree.tree_core
        tokens, spans = prompt("a", "b")
        store.h.serve(tokens, spans, output=())
        tree.check_hicache_events()
        store.wait(lambda: len(tree.ongoing_backup) == 1)
        above, below = store.h.ends()["a"], store.h.ends()["b"]
        tree.evict(EvictParams(num_tokens=len(tokens) - 60))
        assert (above.evicted, below.evicted) == (False, True)
        tree.component.free_host_values([core.give_up_copy(above)])
        drain = tree.drain_storage_control_queues

        def drained() -> None:
            permits.release()
            drain()

        with no_room_on_host(store.h):
            monkeypatch.setattr(tree, "drain_storage_control_queues", drained)
            evict_all(store.h)
            assert not tree.ongoing_backup
        store.h.check()


def test_a_pinned_place_that_neither_tier_has_room_for_is_given_up(caplog):
    with harness(device_tokens=130, host_tokens=200) as h:
        h.serve(*prompt("a"), output=())
        with no_room_on_host(h):
            h.tree.control.pin(Pin(Selector(id="a"), "host"))
            evict_all(h)
        assert h.nodes() == []
        assert h.tree.control.pinned()["host"]["places"] == 0
        assert [pin["id"] for pin in h.tree.control.pins()] == ["a"]
        assert "given up on host: 1 places" in caplog.text
        h.check()
