"""Invalidated documents are found no more, whatever is being done with them at that moment."""

from __future__ import annotations

import pytest
from tree_harness import harness
from unit.control.retiring import (
    POLICIES,
    end,
    hits,
    ids,
    invalidate,
    is_empty_but_for,
    start,
)
from unit.tree.prompts import SYSTEM, prompt

from rag_radix.statistics import DocumentKey


@pytest.mark.parametrize("moment", ["prefilling", "between chunks", "prefilled", "decoding"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_request_in_progress_has_computed_is_never_found(policy, moment):
    with harness(device_tokens=2000, policy=policy) as h:
        req = start(h, "a", "b", chunk=70 if moment == "between chunks" else None)
        if moment != "prefilling":
            h.publish(req)
        if moment == "decoding":
            h.decode(req, 1)
        removed = invalidate(h, id="a")
        assert removed.requests == 1
        if moment != "prefilling":
            assert removed.in_use.device_tokens > 0
        assert hits(h, "a", "b") <= len(SYSTEM)
        assert hits(h, "a", "b") > len(SYSTEM)  # what was computed since is
        while req.extend_end < len(req.origin_input_ids):
            h.publish(req)
            h.compute(req)
        if moment in ("prefilling", "between chunks"):
            h.publish(req)
        end(h, req)
        assert h.tree.control.report()["retired_nodes"] == 0
        assert h.tree.protected_size() == 0
        invalidate(h, id="a")
        assert is_empty_but_for(h, len(SYSTEM))


def test_a_request_that_only_stands_on_what_goes_publishes_no_more():
    with harness(device_tokens=2000) as h:
        h.serve(*prompt("a"))
        tokens, _ = prompt("a", "b")
        req = h.request(tokens)  # it names no documents
        h.admit(req)
        h.compute(req)
        assert invalidate(h, id="a").requests == 1
        h.publish(req)
        end(h, req)
        assert is_empty_but_for(h, len(SYSTEM))


def test_a_request_that_waits_computes_anew_and_publishes():
    with harness(device_tokens=2000) as h:
        h.serve(*prompt("a"))
        waiting = h.request(*prompt("a", question=1))
        assert invalidate(h, id="a").requests == 0
        h.admit(waiting)
        assert waiting.cached_tokens_device == len(SYSTEM)
        h.compute(waiting)
        h.publish(waiting)
        end(h, waiting)
        assert ids(h) == {"a"}


def test_a_request_of_another_document_goes_on_as_before():
    with harness(device_tokens=2000) as h:
        h.serve(*prompt("a"))
        req = start(h, "b")
        assert invalidate(h, id="a").requests == 0
        h.publish(req)
        end(h, req)
        assert ids(h) == {"b"}


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_and_loads_in_flight_end_before_their_nodes_go(policy):
    config = {"swap_out": "eager"}
    with harness(device_tokens=1000, host_tokens=1000, policy=policy, policy_config=config) as h:
        h.hold_copies()
        h.serve(*prompt("a"))
        removed = invalidate(h, id="a")
        assert removed.in_use.nodes > 0
        assert h.tree.control.report()["retired_nodes"] > 0
        assert hits(h, "a") == len(SYSTEM)
        h.finish_copies()
        h.poll()
        assert h.tree.control.report()["retired_nodes"] == 0
        h.check()


def test_a_load_back_that_was_begun_ends_and_is_dropped():
    with harness(device_tokens=150, host_tokens=1000) as h:
        for name in "abcdef":
            h.serve(*prompt(name))
        req = h.request(*prompt("a", question=1))
        req.init_next_round_input(h.tree)
        h.load_back(req)
        h.start(req)
        assert req.cached_tokens_host == 40
        assert invalidate(h, id="a").requests == 1
        h.poll()
        h.compute(req)
        h.publish(req)
        end(h, req)
        assert "a" not in ids(h)
        assert h.tree.control.report()["retired_nodes"] == 0


def test_a_retracted_request_computes_anew():
    with harness(device_tokens=2000) as h:
        req = start(h, "a")
        h.publish(req)
        h.decode(req, 1)
        h.drop(req)
        req.reset_for_retract()
        invalidate(h, id="a")
        h.admit(req)
        assert req.prefix_len == len(SYSTEM)
        h.compute(req)
        h.publish(req)
        end(h, req)


def test_speculations_on_what_goes_are_counted_without_it():
    with harness(device_tokens=2000) as h:
        guess = h.guess(*prompt("a"))
        h.admit(guess)
        h.compute(guess)
        h.publish(guess)
        invalidate(h, id="a")
        assert h.tree.speculations.promote(guess.rid) == "running"
        end(h, guess)
        ended = h.guess(*prompt("b"))
        h.admit(ended)
        h.compute(ended)
        h.publish(ended)
        end(h, ended)
        invalidate(h, id="b")
        assert h.tree.speculations.promote(ended.rid) == "finished"
        h.check()


def test_what_waits_for_its_last_user_is_still_evicted_and_flushed():
    with harness(device_tokens=400, host_tokens=400) as h:
        req = start(h, "a")
        h.publish(req)
        invalidate(h, prefix="")
        for name in "bcdefgh":
            h.serve(*prompt(name))
        end(h, req)
        h.tree.reset()
        h.allocator.clear()
        assert h.tree.control.report()["retired_nodes"] == 0


def test_new_weights_leave_nothing_even_where_sglang_does_not_flush():
    from types import SimpleNamespace

    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Updater,
    )

    from rag_radix import scheduler_hooks

    target = f"{Updater.__module__}.{Updater.__name__}.flush_cache_after_weight_update"
    _, hook = scheduler_hooks.TARGETS[target]
    with harness(device_tokens=2000, host_tokens=2000) as h:
        h.serve(*prompt("b"))
        req = start(h, "a")
        updater = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=h.tree))
        asked = SimpleNamespace(flush_cache=False, torch_empty_cache=False)
        result = Updater.flush_cache_after_weight_update(updater, asked, True, "")
        assert hook(result, updater, asked, True, "") is None
        assert req.skip_radix_cache_insert
        h.publish(req)
        end(h, req)
        assert h.nodes() == []


def test_a_request_of_a_tenant_that_goes_publishes_no_more():
    with harness(device_tokens=2000) as h:
        reqs = [h.request(range(3000, 3050), cache_salt=salt) for salt in ("one", "two")]
        for req in reqs:
            h.admit(req)
            h.compute(req)
        removed = invalidate(h, prefix="", namespace=DocumentKey("", cache_salt="one").namespace)
        assert removed.requests == 1
        assert [req.skip_radix_cache_insert for req in reqs] == [True, False]
        for req in reqs:
            end(h, req)
        assert {node.key.cache_salt for node in h.nodes()} == {"two"}
