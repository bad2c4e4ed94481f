"""After a start the hottest stored documents come to host before anybody asks for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from unit.storage.stores import server
from unit.tree.prompts import DOCUMENT_TOKENS, SYSTEM, prompt

from rag_radix import scheduler_hooks
from rag_radix.control.selector import Selector
from rag_radix.storage import preloading as preloading_module

SYSTEM_AND_ONE = len(SYSTEM) + DOCUMENT_TOKENS


def again(directory, share=0.5, **options):
    """The next server on `directory`, which preloads."""
    return server(directory, policy_config={"preload_host_share": share}, **options)


def preloaded(store):
    """What it says of itself once it has come to its end."""
    store.wait(lambda: store.tree.storing.report()["preloaded"]["state"] != "running")
    store.h.check()
    store.check_host()
    return store.tree.storing.report()["preloaded"]


def filled(directory, *uses, **options):
    """A server that is killed after so many questions about each document."""
    with server(directory, **options) as first:
        for name, count in uses:
            for question in range(count):
                first.ask(prompt(*name.split(), question=question))
        first.stop()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", ["pgdsf", "pgdsf-plus", "lru"])
def test_what_was_stored_is_on_host_before_the_first_question(tmp_path, page_size, policy):
    filled(tmp_path, ("a b", 3), ("c", 1), page_size=page_size, policy=policy)
    with again(tmp_path, page_size=page_size, policy=policy) as second:
        report = preloaded(second)
        assert (report["state"], report["left"]) == ("done", 0)
        assert report["tokens"] == len(SYSTEM) + 3 * DOCUMENT_TOKENS
        assert all(second.h.on_host(name) for name in "abc")
        assert not second.h.on_device("a")
        assert second.h.ends()["b"].statistics.frequency == 3
        req = second.ask(prompt("a", "b", question=9))
        assert (req.from_storage, req.cached_tokens_host) == (0, SYSTEM_AND_ONE + DOCUMENT_TOKENS)


def test_what_is_worth_most_comes_first_and_no_more_than_the_share(tmp_path):
    filled(tmp_path, ("cold", 1), ("hot", 5), ("warm", 3))
    room = (SYSTEM_AND_ONE + DOCUMENT_TOKENS) / 2000
    with again(tmp_path, share=room) as second:
        assert preloaded(second)["tokens"] == SYSTEM_AND_ONE + DOCUMENT_TOKENS
        assert set(second.h.ends()) == {"hot", "warm"}


def test_a_server_that_was_killed_before_it_wrote_statistics_has_left_documents_all_the_same(
    tmp_path,
):
    with server(tmp_path) as first:
        first.ask(prompt("a", "b"))
        first.ask(prompt("c"), cache_salt="secret")
    assert not list(tmp_path.glob("*/statistics.json"))
    with again(tmp_path) as second:
        preloaded(second)
        assert set(second.h.ends()) == {"a", "b"}
        assert not any(node.names_forgotten for node in second.h.nodes())
        second.tree.control.invalidate(Selector(id="b"))
        assert second.ask(prompt("a", "b")).cached_tokens_host == SYSTEM_AND_ONE


def test_a_share_of_nothing_turns_it_off(tmp_path):
    filled(tmp_path, ("a", 3))
    with again(tmp_path, share=0) as second:
        assert preloaded(second)["paths"] == 0
        assert not second.h.nodes()


def test_it_takes_no_place_from_what_is_there(tmp_path):
    filled(tmp_path, ("a", 3))
    with again(tmp_path, share=1, host_tokens=2 * SYSTEM_AND_ONE, device_tokens=400) as second:
        second.tree.storing.is_idle = lambda: False
        second.ask(prompt("x", "y", "z"))
        second.tree.waiting, second.tree.storing.is_idle = tuple, lambda: True
        assert preloaded(second)["tokens"] == 0
        assert second.h.on_host("x")


def test_requests_go_before(tmp_path, monkeypatch):
    monkeypatch.setattr(preloading_module, "_BUSY_PASSES", 5)
    filled(tmp_path, ("a", 3))
    with again(tmp_path) as second:
        waiting = [second.h.request(*prompt("b"))]
        second.tree.waiting = lambda: waiting
        for _ in range(30):
            second.h.poll()
        assert not second.tree.ongoing_prefetch
        assert not second.h.nodes()
        waiting.clear()
        second.tree.storing.is_idle = lambda: False
        for _ in range(4):
            second.h.poll()
        assert not second.tree.ongoing_prefetch
        second.h.poll()
        assert second.tree.ongoing_prefetch
        assert preloaded(second)["tokens"] == SYSTEM_AND_ONE


def test_what_a_tenant_has_asked_is_neither_readable_in_files_nor_preloaded(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("public"))
        first.ask(prompt("private"), cache_salt="secret")
        paths = first.files._index
        assert sorted(bool(segment.header.tokens) for segment in paths) == [False] * 2 + [True] * 2
        first.stop()
    with again(tmp_path) as second:
        preloaded(second)
        assert set(second.h.ends()) == {"public"}
        assert second.ask(prompt("private"), cache_salt="secret").from_storage == SYSTEM_AND_ONE


def test_a_damaged_file_costs_only_what_it_held(tmp_path):
    filled(tmp_path, ("a", 3), ("b", 2))
    with server(tmp_path) as probe:
        names = {n.id: s.path for s in probe.files._index for n in s.header.names}
    whole = names["a"].read_bytes()
    names["a"].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with again(tmp_path) as second:
        preloaded(second)
        assert second.h.on_host("b")
        assert "a" not in second.h.ends()
        assert second.ask(prompt("a", question=5)).cached_tokens_host >= len(SYSTEM)


def test_ranks_that_have_read_differently_leave_a_path_in_the_files(tmp_path, monkeypatch):
    filled(tmp_path, ("a", 3))
    monkeypatch.setattr(preloading_module, "is_alike", lambda tree, content: False)
    with again(tmp_path) as second:
        assert preloaded(second)["paths"] == 0
        assert second.ask(prompt("a", question=5)).from_storage == SYSTEM_AND_ONE


@pytest.mark.parametrize("when", ["before", "while it is read", "after"])
def test_an_invalidated_document_does_not_come_back(tmp_path, when):
    filled(tmp_path, ("a", 3), ("b", 2))
    with again(tmp_path) as second:
        if when == "while it is read":
            second.wait(lambda: second.tree.ongoing_prefetch)
        if when == "after":
            preloaded(second)
        second.tree.control.invalidate(Selector(id="a"))
        preloaded(second)
        assert "a" not in second.h.ends()
        req = second.ask(prompt("a", question=9))
        assert req.cached_tokens_host + req.cached_tokens_device + req.from_storage <= len(SYSTEM)


@pytest.mark.parametrize("name", ["a", "alias"])
def test_a_document_that_two_servers_named_differently_goes_by_either_name(tmp_path, name):
    tokens, [(_, start, end)] = prompt("a")
    with server(tmp_path) as first:
        first.ask(prompt("a"))  # its name is in the file alone, since it is killed
    with server(tmp_path) as second:
        second.ask((tokens, [("alias", start, end)]))
        second.stop()
    with again(tmp_path) as third:
        preloaded(third)
        assert third.tree.control.invalidate(Selector(id=name)).places == 1
        req = third.ask(prompt("a", question=9))
        assert req.cached_tokens_host + req.cached_tokens_device + req.from_storage <= len(SYSTEM)


def test_a_flush_ends_it(tmp_path):
    filled(tmp_path, ("a", 3))
    with again(tmp_path) as second:
        second.tree.reset()
        second.h.allocator.clear()
        assert preloaded(second)["state"] == "stopped"
        assert not second.h.nodes()


def test_an_idle_server_does_not_sleep_before_it_is_done(tmp_path):
    filled(tmp_path, ("a", 3))
    slept = []
    with again(tmp_path) as second:
        scheduler = SimpleNamespace(tree_cache=second.tree)
        scheduler_hooks._around_sleep(slept.append, scheduler)
        assert not slept
        preloaded(second)
        scheduler_hooks._around_sleep(slept.append, scheduler)
    scheduler_hooks._around_sleep(slept.append, SimpleNamespace(tree_cache=None))
    assert len(slept) == 2
