"""Storage that fails costs hits, never an answer."""

from __future__ import annotations

import errno
import shutil
import threading

import pytest
from unit.storage.stores import server
from unit.tree.prompts import DOCUMENT_TOKENS, SYSTEM, prompt

from rag_radix.storage import files as files_module
from rag_radix.storage import sidecar as sidecar_module

SYSTEM_AND_ONE = len(SYSTEM) + DOCUMENT_TOKENS


def raising(error):
    def fail(*args):
        raise OSError(error, "no")

    return fail


def warnings(caplog):
    return [r for r in caplog.records if r.name.startswith("rag_radix") and r.levelno >= 30]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing(tmp_path, monkeypatch, caplog, error):
    monkeypatch.setattr(files_module, "write_segment", raising(error))
    monkeypatch.setattr(sidecar_module, "write_atomically", raising(error))
    with server(tmp_path, device_tokens=150, host_tokens=150) as store:
        for question in range(3):
            for name in "abcd":
                store.ask(prompt(name, question=question))
        assert store.files.counters.failed_writes > 0
        assert len(store.files) == 0
        said = [r for r in warnings(caplog) if "statistics.json" not in r.getMessage()]
        assert len(said) == 1
        assert len(warnings(caplog)) <= 2
        assert not len(store.files._promises)
        store.stop()


def test_a_disk_that_returns_errors(tmp_path, monkeypatch, caplog):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    monkeypatch.setattr(files_module, "read_pages", raising(errno.EIO))
    with server(tmp_path) as second:
        req = second.ask(prompt("a", question=1))
        assert (req.from_storage, req.cached_tokens_device, req.cached_tokens_host) == (0, 0, 0)
        assert len(warnings(caplog)) == 1


def test_a_disk_that_is_slow_to_write_delays_nobody(tmp_path, monkeypatch):
    go_on, write = threading.Event(), files_module.write_segment

    def slow(*args):
        go_on.wait(20)
        return write(*args)

    monkeypatch.setattr(files_module, "write_segment", slow)
    with server(tmp_path, device_tokens=150, host_tokens=150) as store:
        for name in "abcdefgh":
            store.h.serve(*prompt(name))
        assert store.files.counters.written_files == 0
        go_on.set()
        store.settle()
        assert store.files.counters.written_files > 0
        store.h.check()


def test_a_disk_that_is_slow_to_read_is_waited_for_so_long_and_no_longer(tmp_path, monkeypatch):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    go_on, read = threading.Event(), files_module.read_pages

    def slow(*args):
        go_on.wait(20)
        return read(*args)

    monkeypatch.setattr(files_module, "read_pages", slow)
    with server(tmp_path, waits_s=0.05) as second:
        req = second.ask(prompt("a", question=1))
        assert (req.from_storage, req.cached_tokens_device, req.cached_tokens_host) == (0, 0, 0)
        go_on.set()
        second.ask(prompt("b", question=2))
        second.h.check()


def test_a_host_full_of_what_is_in_use_reads_nothing_and_leaks_nothing(tmp_path):
    with server(tmp_path) as first:
        for name in "ab":
            first.ask(prompt(name))
    with server(tmp_path, host_tokens=SYSTEM_AND_ONE) as second:
        second.ask(prompt("a", question=1))
        holder = second.h.request(*prompt("a", question=2))
        second.h.admit(holder)
        node = second.tree.tree_core.node_by_id(holder.lock.node)
        lock = second.tree.inc_host_lock_ref(node.id).to_dec_params()
        above = second.tree.inc_host_lock_ref(node.parent.id).to_dec_params()
        assert second.ask(prompt("b", question=3)).from_storage <= 1  # SGLang adds a slot
        second.tree.dec_host_lock_ref(node.id, lock)
        second.tree.dec_host_lock_ref(node.parent.id, above)
        second.h.compute(holder)
        second.h.publish(holder)
        second.h.finish(holder)
        second.h.check()


def test_what_could_not_be_written_is_written_when_the_disk_is_well(tmp_path, monkeypatch):
    from rag_radix.storage import promises, storing

    monkeypatch.setattr(storing, "_POLLS", 1)
    monkeypatch.setattr(promises, "_RETRY_S", 0.1)
    with server(tmp_path) as store:
        with monkeypatch.context() as broken:
            broken.setattr(files_module, "write_segment", raising(errno.ENOSPC))
            store.ask(prompt("a"))
        assert len(store.files) == 0
        store.ask(prompt("b", question=1))
        wanted = SYSTEM_AND_ONE + DOCUMENT_TOKENS
        store.wait(lambda: store.files.counters.written_pages == wanted)
    with server(tmp_path) as second:
        assert second.ask(prompt("a", question=2)).from_storage == SYSTEM_AND_ONE


def test_a_directory_that_was_removed_is_made_and_filled_anew(tmp_path, monkeypatch):
    from rag_radix.storage import promises, storing

    monkeypatch.setattr(storing, "_POLLS", 1)
    monkeypatch.setattr(promises, "_RETRY_S", 0.1)
    with server(tmp_path / "files") as store:
        store.ask(prompt("a"))
        shutil.rmtree(tmp_path / "files")
        store.ask(prompt("b", question=1))
        wanted = SYSTEM_AND_ONE + DOCUMENT_TOKENS
        store.wait(lambda: store.files.counters.written_pages == SYSTEM_AND_ONE + wanted)
        store.stop()
    with server(tmp_path / "files") as second:
        assert second.ask(prompt("a", question=2)).from_storage == SYSTEM_AND_ONE


@pytest.mark.parametrize("policy", ["pgdsf", "pgdsf-plus"])
def test_a_disk_that_is_well_again_leaves_the_hottest_what_they_are(tmp_path, policy):
    with server(tmp_path, policy=policy) as store:
        for question in range(4):
            store.ask(prompt("a", question=question))
        node = store.h.ends()["a"]
        history = node.statistics.history
        store.tree.component.device.rank(node)
        ranks = list(node.ranks)
        store.tree.storing._store_again()
        store.settle()
        store.tree.component.device.rank(node)
        assert node.mark is not None
        assert (node.statistics.history, node.ranks) == (history, ranks)


def test_a_backend_that_fails_at_random_costs_only_hits(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    found = servers = 0
    while servers < 3 or (not found and servers < 20):
        servers += 1
        with server(tmp_path, device_tokens=250, host_tokens=300) as store:
            for question in range(8):
                names = [("a", "b"), ("b",), ("c", "a"), ("d",)][question % 4]
                found += store.ask(prompt(*names, question=question)).from_storage
    assert found > 0
