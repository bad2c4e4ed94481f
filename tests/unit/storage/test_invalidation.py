"""What is invalidated is read no more: not now, not after a restart, not from what is under way."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import pytest
from unit.storage.stores import server
from unit.tree.prompts import DOCUMENT_TOKENS, SYSTEM, document, prompt

from rag_radix.control.selector import Selector
from rag_radix.statistics import namespace_name
from rag_radix.storage import directory as directory_module
from rag_radix.storage import storing as storing_module

SYSTEM_TOKENS = len(SYSTEM)
SYSTEM_AND_ONE = SYSTEM_TOKENS + DOCUMENT_TOKENS


def invalidate(store, **selector):
    return store.tree.control.invalidate(Selector(**selector))


@pytest.mark.parametrize("selector", [{"id": "a"}, {"prefix": "a"}, {"id": "a", "version": ""}])
def test_a_document_is_read_no_more_and_others_are(tmp_path, selector):
    with server(tmp_path) as first:
        first.ask(prompt("a", "b"))
        first.ask(prompt("b", "a", question=1))
        invalidate(first, **selector)
    with server(tmp_path) as second:
        assert second.ask(prompt("a", "b", question=2)).from_storage == SYSTEM_TOKENS
        assert second.ask(prompt("b", "a", question=3)).from_storage == DOCUMENT_TOKENS


def read_only(broken, *, files=True):
    """A directory that can't be written any more and, as of a file system that was mounted anew,
    its `files` neither."""

    def failing(*args, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    broken.setattr(Path, "unlink", failing)
    broken.setattr(Path, "replace", failing)
    if files:
        broken.setattr(os, "truncate", failing)


def test_files_of_a_directory_that_is_read_only_are_emptied(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as broken:
        with server(tmp_path) as first:
            first.ask(prompt("a", "b"))
            read_only(broken, files=False)
            storage = invalidate(first, id="a").storage
            assert (storage.files > 0, storage.left_files, storage.is_whole) == (True, 0, True)
            assert first.ask(prompt("a", "c", question=1)).from_storage == 0
        with server(tmp_path) as second:  # the directory is as before
            assert second.ask(prompt("a", "b", question=2)).from_storage == SYSTEM_TOKENS
    assert "so it has been emptied" in caplog.text


def test_what_a_read_only_disk_keeps_is_told_and_goes_when_it_can_be_written(tmp_path, monkeypatch):
    with server(tmp_path) as first:
        first.ask(prompt("a", "b"))
        with monkeypatch.context() as broken:
            read_only(broken)
            for _ in range(2):  # it isn't forgotten
                storage = invalidate(first, id="a").storage
                assert (storage.files, storage.left_files > 0) == (0, True)
                assert storage.directory == str(first.files.directory.parent)
            assert first.ask(prompt("a", question=1)).from_storage == 0
        assert invalidate(first, id="a").storage.is_whole
    with server(tmp_path) as second:
        assert second.ask(prompt("a", "b", question=2)).from_storage == SYSTEM_TOKENS


def test_a_damaged_file_that_a_read_only_disk_keeps_may_hold_what_goes(tmp_path, monkeypatch):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    for path in tmp_path.glob("*/*/*.kv"):
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)
    with server(tmp_path) as second:
        read_only(monkeypatch)
        second.ask(prompt("a", question=1))  # which is where the damage is found
        assert invalidate(second, id="a").storage.left_files > 0


@pytest.mark.parametrize("stops", [True, False])
def test_what_a_read_only_disk_keeps_goes_while_the_server_runs_or_at_its_stop(
    tmp_path, monkeypatch, stops
):
    with server(tmp_path) as first:
        first.ask(prompt("a", "b"))
        with monkeypatch.context() as broken:
            read_only(broken)
            assert not invalidate(first, prefix="").storage.is_whole
        if stops:
            first.stop()
        else:
            monkeypatch.setattr(directory_module, "_REST_S", 0.0)
            monkeypatch.setattr(storing_module, "_POLLS", 1)
            first.files.look()  # the next try is due
            first.h.poll()
    assert list(tmp_path.glob("*/*/*.kv")) == []


def test_a_directory_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    def failing(*args):
        raise OSError(errno.EIO, "Input/output error")

    with server(tmp_path) as first:
        first.ask(prompt("a"))
        with monkeypatch.context() as broken:
            broken.setattr(os, "scandir", failing)
            storage = invalidate(first, id="a").storage
        assert (storage.files, storage.left_files, storage.is_whole) == (1, 0, False)


def test_all_is_read_no_more(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a", "b"))
        invalidate(first, prefix="")
        assert list(tmp_path.glob("*/*/*.kv")) == []
        assert first.ask(prompt("a", "b")).from_storage == 0


def test_a_server_that_never_had_a_document_finds_it_on_disk(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a", "b"))
        first.ask(prompt("c", question=1))
    with server(tmp_path) as second:
        invalidate(second, id="a")
    with server(tmp_path) as third:
        assert third.ask(prompt("a", "b", question=2)).from_storage == SYSTEM_TOKENS
        assert third.ask(prompt("c", question=3)).from_storage == DOCUMENT_TOKENS


def test_a_name_given_after_a_document_was_written_counts_after_a_restart(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
        tokens, [(_, start, end)] = prompt("a", question=1)
        first.ask((tokens, [("alias", start, end)]))
        first.stop()
    with server(tmp_path) as second:
        invalidate(second, id="alias")
        assert second.ask(prompt("a", question=2)).from_storage == SYSTEM_TOKENS


def under_another_name(*names, **options):
    """The same prompt, whose first document has the id "x"."""
    tokens, [(_, start, end), *others] = prompt(*names, **options)
    return tokens, [("x", start, end), *others]


@pytest.mark.parametrize("asked", ["under another name", "without names"])
def test_what_came_back_under_another_name_goes_by_that_in_its_file(tmp_path, asked):
    with server(tmp_path) as first:  # which is killed: only the file has the name
        first.ask(prompt("a", "b"))
    again = under_another_name("a", "b") if asked == "under another name" else prompt("a", "b")
    with server(tmp_path) as second:
        req = second.ask(again if asked == "under another name" else (again[0], ()))
        assert req.from_storage == SYSTEM_AND_ONE + DOCUMENT_TOKENS
        assert invalidate(second, id="a").places == 1
        req = second.ask(prompt("a", question=1))
        cached = req.cached_tokens_device + req.cached_tokens_host + req.from_storage
        assert cached == SYSTEM_TOKENS


def test_what_was_computed_anew_under_another_name_leaves_the_file_that_has_the_name(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    with server(tmp_path) as second:
        second.h.serve(*under_another_name("a"))  # asks nothing of storage
        second.ask(under_another_name("a", question=1))
        assert second.h.ends()["x"].mark is not None
        assert invalidate(second, id="a").storage.files == 1
        assert second.ask(under_another_name("a", question=2)).cached_tokens_device > SYSTEM_TOKENS
    with server(tmp_path) as third:
        assert third.ask(prompt("a", question=3)).from_storage == SYSTEM_TOKENS


def test_what_ranks_have_under_different_names_goes_by_any(tmp_path, monkeypatch):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    with server(tmp_path) as second:
        monkeypatch.setattr(storing_module, "is_alike", lambda tree, content: False)
        second.ask(under_another_name("a"))
        invalidate(second, id="a")
        assert second.ask(prompt("a", question=1)).cached_tokens_device == 0


def test_a_head_that_others_share_stays(tmp_path):
    head, one, other = list(range(700, 720)), document("one"), document("other")
    span = (SYSTEM_TOKENS, SYSTEM_TOKENS + 60)
    prompts = {
        name: ([*SYSTEM, *head, *tail, 1], [(name, *span)])
        for name, tail in (("one", one), ("other", other))
    }
    with server(tmp_path) as first:
        for each in prompts.values():
            first.ask(each)
        first.stop()
    with server(tmp_path) as second:
        invalidate(second, id="one")
    with server(tmp_path) as third:
        assert third.ask(prompts["other"]).from_storage == SYSTEM_TOKENS + 60
        assert third.ask(prompts["one"]).from_storage == 0


def test_what_is_just_being_read_is_not_used(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    with server(tmp_path) as second:
        req = second.h.request(*prompt("a", question=1))
        second.begin(req)
        handle = req.cache_request_handle
        controller = second.tree.cache_controller
        second.wait(lambda: controller.prefetch_hit_queue.qsize() or handle_is_read(second))
        invalidate(second, id="a")
        assert second.tree.check_prefetch_progress(handle)
        time.sleep(0.05)
        second.settle()
        second.h.admit(req)
        assert req.prefix_len == 0
        second.h.compute(req)
        second.h.publish(req)
        second.h.finish(req)
        second.h.check()


def handle_is_read(store):
    return any(info.host_indices is not None for info in store.tree.ongoing_prefetch.values())


def test_what_has_just_been_read_for_a_waiting_request_is_not_used(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    with server(tmp_path) as second:
        req = second.h.request(*prompt("a", question=1))
        assert second.fetch(req) == SYSTEM_AND_ONE
        invalidate(second, id="a")
        second.h.admit(req)
        assert req.prefix_len == SYSTEM_TOKENS
        second.h.compute(req)
        second.h.publish(req)
        second.h.finish(req)


def test_what_is_just_being_copied_is_not_written(tmp_path):
    with server(tmp_path) as first:
        first.h.hold_copies()
        req = first.h.request(*prompt("a"))
        first.h.admit(req)
        first.h.compute(req)
        first.h.publish(req)
        first.h.finish(req)
        invalidate(first, id="a")
        first.h.finish_copies()
        first.settle()
        assert first.files.counters.written_pages == SYSTEM_TOKENS
    with server(tmp_path) as second:
        assert second.ask(prompt("a", question=1)).from_storage == SYSTEM_TOKENS


def test_what_is_computed_anew_is_written_anew(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
        invalidate(first, id="a")
        first.ask(prompt("a", question=1))
    with server(tmp_path) as second:
        assert second.ask(prompt("a", question=2)).from_storage == SYSTEM_AND_ONE


def test_new_weights_read_nothing_of_the_old_ones(tmp_path):
    import torch

    with server(tmp_path, weights=1.0) as store:
        store.ask(prompt("a"))
        model = store.h.model
        torch.nn.init.constant_(model.weight, 2.0)
        store.tree.control.invalidate(Selector(prefix=""))
        store.tree.storing.weights_changed()
        assert store.ask(prompt("a", question=1)).from_storage == 0
    for weights, tokens in ((1.0, 0), (2.0, SYSTEM_AND_ONE)):
        with server(tmp_path, weights=weights, policy_config={"store_after": 9}) as after:
            assert after.ask(prompt("a", question=2)).from_storage == tokens


def test_a_tenant_goes_with_all_that_it_has_asked(tmp_path):
    with server(tmp_path) as first:
        for salt in ("one", "other"):
            first.ask(prompt("a"), cache_salt=salt)
            first.ask((prompt("a")[0], ()), cache_salt=salt)
    with server(tmp_path) as second:
        invalidate(second, prefix="", namespace=namespace_name(None, "one"))
    assert b"one" not in b"".join(path.read_bytes() for path in tmp_path.glob("*/*/*.kv"))
    with server(tmp_path) as third:
        assert third.ask(prompt("a", question=1), cache_salt="one").from_storage == 0
        assert third.ask(prompt("a", question=1), cache_salt="other").from_storage > 0


@pytest.mark.parametrize("seed", range(3))
def test_nothing_stale_is_ever_found_whatever_comes_between(tmp_path, seed):
    rng = random.Random(seed)
    stale: set[str] = set()  # invalidated, and not computed since
    found = 0
    for _ in range(5):
        with server(
            tmp_path,
            device_tokens=rng.choice((250, 500)),
            host_tokens=rng.choice((200, 600)),
            page_size=4,
            policy_config={
                "store_after": rng.choice((1, 2)),
                "storage_gib": 40_000 / 2**30,
                "preload_host_share": rng.choice((0, 0.5, 1)),
            },
        ) as store:
            for question in range(10):
                if rng.random() < 0.25:
                    name = rng.choice("abcd")
                    invalidate(store, id=name)
                    stale.add(name)
                    continue
                names = rng.choices("abcd", k=rng.randint(1, 3))
                req = store.ask(prompt(*names, question=question))
                first = next((i for i, name in enumerate(names) if name in stale), None)
                cached = req.cached_tokens_device + req.cached_tokens_host
                cached += req.cached_tokens_storage
                if first is not None:
                    assert cached <= SYSTEM_TOKENS + first * DOCUMENT_TOKENS
                    stale -= set(names)
                found += req.from_storage
            if rng.random() < 0.5:
                store.stop()
    assert found > 0
