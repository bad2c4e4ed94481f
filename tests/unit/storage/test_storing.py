"""What a server writes to storage and when, and what the next one has of it."""

from __future__ import annotations

import json
import random

import pytest
from tree_harness import harness
from unit.storage.stores import server
from unit.tree.prompts import DOCUMENT_TOKENS, SYSTEM, document, prompt

SYSTEM_TOKENS = len(SYSTEM)
SYSTEM_AND_ONE = SYSTEM_TOKENS + DOCUMENT_TOKENS
SYSTEM_AND_TWO = SYSTEM_TOKENS + 2 * DOCUMENT_TOKENS


def written(store):
    return store.files.counters.written_pages


@pytest.mark.parametrize("page_size", [1, 4])
def test_documents_come_back_after_a_server_was_killed(tmp_path, page_size):
    with server(tmp_path, page_size=page_size) as first:
        first.ask(prompt("a", "b"))
    with server(tmp_path, page_size=page_size) as second:
        assert second.ask(prompt("a", "b", question=1)).from_storage == SYSTEM_AND_TWO
        again = second.ask(prompt("a", "b", question=2))
        assert (again.from_storage, again.cached_tokens_device) == (0, SYSTEM_AND_TWO)
        assert second.ask(prompt("a", "c", question=3)).cached_tokens_device == SYSTEM_AND_ONE
        assert second.h.on_host("b")


def test_another_page_size_has_other_files(tmp_path):
    with server(tmp_path, page_size=4) as first:
        first.ask(prompt("a"))
    with server(tmp_path, page_size=2) as second:
        assert second.ask(prompt("a")).from_storage == 0


def test_other_weights_have_other_files_and_the_same_ones_find_theirs(tmp_path):
    with server(tmp_path, weights=1.0) as first:
        first.ask(prompt("a"))
    with server(tmp_path, weights=1.0000001) as second:
        assert second.ask(prompt("a")).from_storage == 0
    with server(tmp_path, weights=1.0) as third:
        assert third.ask(prompt("a")).from_storage == SYSTEM_AND_ONE


def test_questions_and_outputs_are_not_written(tmp_path):
    with server(tmp_path) as store:
        store.ask(prompt("a"))
        assert written(store) == SYSTEM_AND_ONE


def test_by_default_what_is_used_again_is_written_while_it_is_on_the_device(tmp_path):
    with server(tmp_path, policy_config={"store_after": 2}) as store:
        store.ask(prompt("a"))
        assert written(store) == 0
        store.ask(prompt("b", question=1))
        assert written(store) == SYSTEM_TOKENS
        store.ask(prompt("a", question=2))
        assert written(store) == SYSTEM_AND_ONE


def test_what_leaves_the_device_is_written_once_its_prefix_is(tmp_path):
    with server(tmp_path, device_tokens=120, policy_config={"store_after": 9}) as store:
        store.ask(prompt("a"))
        store.ask(prompt("b", question=1))
        store.ask(prompt("c", question=2))
        assert store.h.on_host("a")
        assert written(store) == 0  # the system text is on the device only
        evict(store)
        store.settle()
        assert written(store) == SYSTEM_TOKENS + 3 * DOCUMENT_TOKENS
    with server(tmp_path) as second:
        assert second.ask(prompt("b")).from_storage == SYSTEM_AND_ONE


def evict(store, tokens=10_000):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    store.tree.evict(EvictParams(num_tokens=tokens))


def test_a_node_is_written_once_in_all_servers(tmp_path):
    with server(tmp_path, device_tokens=120) as first:
        for question in range(4):
            first.ask(prompt("a", question=question))
            first.ask(prompt("b", question=question))
        evict(first)
        first.settle()
        assert written(first) == SYSTEM_TOKENS + 2 * DOCUMENT_TOKENS
    with server(tmp_path, device_tokens=120) as second:
        for question in range(4):
            second.ask(prompt("a", question=question))
            second.ask(prompt("b", question=question))
        evict(second)
        second.settle()
        assert written(second) == 0


def test_documents_that_begin_alike_are_cut_where_they_part(tmp_path):
    head, one, other = list(range(700, 720)), document("one"), document("other")
    prompts = [
        ([*SYSTEM, *head, *tail, question], [("doc", SYSTEM_TOKENS, SYSTEM_TOKENS + 60)])
        for question, tail in enumerate((one, other))
    ]
    with server(tmp_path) as first:
        for each in prompts:
            first.ask(each)
        assert written(first) == SYSTEM_TOKENS + 20 + 2 * DOCUMENT_TOKENS
    with server(tmp_path) as second:
        assert second.ask(prompts[1]).from_storage == SYSTEM_TOKENS + 60
        assert second.ask(prompts[0]).from_storage == DOCUMENT_TOKENS


def test_a_document_behind_a_prefix_that_was_computed_anew_comes_back(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    with server(tmp_path, policy_config={"store_after": 9}) as second:
        second.tree.cache_controller.prefetch_threshold = 1
        second.h.serve(*prompt("b"))  # asks nothing of storage
        req = second.ask(prompt("a"))
        assert (req.from_storage, req.cached_tokens_device) == (DOCUMENT_TOKENS, SYSTEM_TOKENS)


def test_statistics_come_back_with_the_node(tmp_path):
    with server(tmp_path) as first:
        for question in range(5):
            first.ask(prompt("a", question=question))
        node = first.h.ends()["a"]
        was, time = node.statistics.copy(), first.tree.tree_core.access_time
        first.stop()
    with server(tmp_path) as second:
        assert second.tree.tree_core.access_time == time
        second.ask(prompt("a", question=9))
        statistics = second.h.ends()["a"].statistics
        assert statistics.frequency == was.frequency + 1
        assert statistics.document_frequency == was.document_frequency + 1
        assert statistics.mean_cost_per_token_s == was.mean_cost_per_token_s
        assert second.h.ends()["a"].parent.statistics.frequency >= statistics.frequency


def test_a_document_that_is_computed_anew_goes_on_with_its_frequency(tmp_path):
    with server(tmp_path) as first:
        for question in range(5):
            first.ask(prompt("a", question=question))
        first.stop()
    with server(tmp_path) as second:
        second.ask(prompt("b", "a"))
        assert second.h.ends()["a"].statistics.document_frequency == 6


def test_documents_are_known_again_without_being_named(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a", "b"))
        first.stop()
    with server(tmp_path) as second:
        second.ask((prompt("a", "b")[0], ()))
        assert set(second.h.ends()) == {"a", "b"}


@pytest.mark.parametrize("damage", [b"", b"what", b'0\n{"format": 1}'])
def test_damaged_statistics_are_ignored_with_a_warning(tmp_path, caplog, damage):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
        first.stop()
    (path,) = tmp_path.glob("*/statistics.json")
    path.write_bytes(damage)
    with server(tmp_path) as second:
        assert "is damaged and is ignored" in caplog.text
        assert second.ask(prompt("a", question=1)).from_storage == SYSTEM_AND_ONE


def test_what_came_from_storage_is_counted_as_such(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    with server(tmp_path) as second:
        second.ask(prompt("a", question=1))
        second.ask(prompt("a", question=2))
        counters = second.tree.counters
        assert (counters.storage_hit_tokens, counters.device_hit_tokens) == (SYSTEM_AND_ONE,) * 2
        assert counters.host_hit_documents == 1


def test_a_flush_empties_memory_and_leaves_storage(tmp_path):
    with server(tmp_path) as store:
        store.ask(prompt("a"))
        store.tree.reset()
        store.h.allocator.clear()  # as SGLang's flush does after it
        assert store.ask(prompt("a", question=1)).from_storage == SYSTEM_AND_ONE


def test_a_stop_waits_for_what_is_being_written(tmp_path):
    with server(tmp_path) as first:
        tokens, documents = prompt("a", "b", "c")
        req = first.h.request(tokens, documents)
        first.h.admit(req)
        first.h.compute(req)
        first.h.publish(req)
        first.h.finish(req)
        first.stop()
    with server(tmp_path) as second:
        assert second.ask(prompt("a", "b", "c")).from_storage == SYSTEM_AND_TWO + DOCUMENT_TOKENS


def test_two_servers_at_once_have_each_others_documents(tmp_path, monkeypatch):
    from rag_radix.storage import directory

    monkeypatch.setattr(directory, "_RESCAN_S", 0.0)
    with server(tmp_path) as one, server(tmp_path) as other:
        one.ask(prompt("a"))
        other.ask(prompt("b"))
        assert other.ask(prompt("a")).from_storage == DOCUMENT_TOKENS
        assert one.ask(prompt("b")).from_storage == DOCUMENT_TOKENS


def test_the_budget_is_kept_and_what_is_used_most_stays(tmp_path):
    with server(tmp_path / "probe") as probe:
        probe.ask(prompt("a"))
        one = probe.files.bytes
    config = {"storage_gib": one * 2.2 / 2**30}
    with server(tmp_path / "files", policy_config=config) as store:
        for question in range(3):
            store.ask(prompt("hot", question=question))
        for name in "abcdef":
            store.ask(prompt(name))
        assert store.files.bytes <= one * 2.2
        assert store.files.counters.evicted_files > 0
    with server(tmp_path / "files") as second:
        assert second.ask(prompt("hot")).from_storage == SYSTEM_AND_ONE


def test_a_host_that_is_too_small_for_what_storage_has_serves_all_the_same(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a", "b", "c"))
    with server(tmp_path, device_tokens=400, host_tokens=59) as second:
        assert second.ask(prompt("a", "b", "c")).from_storage <= 60
        second.ask(prompt("d"))


@pytest.mark.parametrize("policy", ["pgdsf", "pgdsf-plus", "adaptive", "lru"])
def test_any_requests_and_restarts_leave_every_kv_right(tmp_path, policy):
    rng = random.Random(policy)
    from_storage = 0
    for _ in range(4):
        with server(
            tmp_path,
            device_tokens=rng.choice((250, 400)),
            host_tokens=rng.choice((150, 600)),
            page_size=4,
            policy=policy,
            policy_config={
                "store_after": rng.choice((1, 2)),
                "preload_host_share": rng.choice((0, 0.5, 1)),
            },
        ) as store:
            for question in range(12):
                names = rng.choices("abcdef", weights=(9, 6, 4, 2, 1, 1), k=rng.randint(1, 3))
                from_storage += store.ask(prompt(*names, question=question)).from_storage
            if rng.random() < 0.5:
                store.stop()
    assert from_storage > 0


def test_what_was_cleared_is_written_again(tmp_path):
    with server(tmp_path) as store:
        store.ask(prompt("a"))
        assert store.tree.clear_storage_backend()
        assert list(tmp_path.glob("*/*/*.kv")) == []
        evict(store)
        store.ask(prompt("a", question=1))
    with server(tmp_path) as second:
        assert second.ask(prompt("a", question=2)).from_storage == SYSTEM_AND_ONE


def test_what_is_below_what_was_cleared_is_written(tmp_path):
    with server(tmp_path) as store:
        store.ask(prompt("a"))
        assert store.tree.clear_storage_backend()
        store.ask(prompt("b", question=1))
    with server(tmp_path) as second:
        assert second.ask(prompt("b", question=2)).from_storage == SYSTEM_AND_ONE


def attach(store, directory):
    extra = {"prefetch_threshold": 1, "file_storage_path": str(directory)}
    return store.tree.attach_storage_backend(
        storage_backend="file", storage_backend_extra_config_json=json.dumps(extra)
    )


def flush(store):
    store.tree.reset()
    store.h.allocator.clear()


def test_a_backend_is_attached_to_an_empty_tree_only(tmp_path):
    """What tenants have below public documents would be hashed as if it were public."""
    with server(tmp_path) as store:
        assert store.tree.detach_storage_backend()[0]
        store.h.serve(*prompt("public", "private"), cache_salt="tenant", salt_from=1)
        done, message = attach(store, tmp_path)
        assert not done
        assert "/flush_cache" in message
        flush(store)
        assert attach(store, tmp_path)[0]
        store.ask(prompt("public", "private"), cache_salt="tenant", salt_from=1)
        assert store.files.counters.written_pages == SYSTEM_AND_TWO
        assert attach(store, tmp_path)[0]  # SGLang takes it for a change of its policies
    with server(tmp_path) as second:
        assert second.ask(prompt("public", "private", question=1)).from_storage == 0


def test_no_backend_is_attached_where_there_are_adapters(tmp_path):
    with harness(device_tokens=100, host_tokens=200, enable_lora=True) as h:
        done, message = h.tree.attach_storage_backend(storage_backend="file")
        assert not done
        assert "LoRA" in message
        assert not h.tree.enable_storage


def test_new_weights_after_a_backend_was_detached_are_nothing_to_storage(tmp_path, caplog):
    with server(tmp_path) as store:
        store.ask(prompt("a"))
        assert store.tree.detach_storage_backend()[0]
        store.tree.storing.weights_changed()
        assert caplog.text == ""


def test_servers_that_share_a_directory_keep_each_others_statistics(tmp_path):
    with server(tmp_path) as one, server(tmp_path) as other:
        for question in range(3):
            one.ask(prompt("a", question=question))
        other.ask(prompt("b"))
        one.stop()
        other.stop()
    with server(tmp_path) as third:
        third.ask(prompt("a", question=8))
        third.ask(prompt("b", question=9))
        frequencies = {n: third.h.ends()[n].statistics.document_frequency for n in "ab"}
        assert frequencies == {"a": 4, "b": 2}


def test_a_document_that_tenants_share_is_known_again_as_such(tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a", "b"), cache_salt="tenant", salt_from=1)
        first.stop()
    with server(tmp_path) as second:
        second.ask((prompt("a", "b", question=1)[0], ()), cache_salt="tenant")
        documents = [o.document for node in second.h.nodes() for o in node.occurrences]
        assert {each.id: each.cache_salt for each in documents} == {"a": None, "b": "tenant"}
