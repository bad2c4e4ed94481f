"""Pinned documents stay, within a budget, for as long as they are pinned."""

from __future__ import annotations

from types import SimpleNamespace

import orjson
import pytest
from sglang.srt.runtime_context import get_parallel
from tree_harness import harness
from unit.tree.prompts import SYSTEM, prompt

from rag_radix.control.actions import ACTIONS
from rag_radix.control.pins import Pin
from rag_radix.control.selector import Selector
from rag_radix.errors import ControlError

POLICIES = ["pgdsf", "pgdsf-plus", "lru"]


def pin(h, name, tier="device", *, version=None, expires_s=None):
    places = h.tree.control.pin(Pin(Selector(id=name, version=version), tier, expires_s))
    h.check()
    return places


def unpin(h, name, **selector):
    given_up = h.tree.control.unpin(Selector(id=name, **selector))
    h.check()
    return given_up


def flood(h, times=2):
    """Other documents, more than either tier holds, each of them read often."""
    for _ in range(times):
        for name in "lmnopqrstuvwxyz":
            for question in range(3):
                h.serve(*prompt(name, question=question))


def pinned(h, tier):
    return h.tree.control.report()["pins"][tier]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_document_pinned_on_the_device_stays_there_with_its_prefix(policy):
    with harness(device_tokens=400, host_tokens=200, policy=policy) as h:
        h.serve(*prompt("a", "b"))
        assert pin(h, "b") == 1
        assert pinned(h, "device")["pinned_tokens"] == len(SYSTEM) + 80
        flood(h)
        req = h.serve(*prompt("a", "b", question=5))
        assert req.cached_tokens_device == len(SYSTEM) + 80
        assert h.tree.protected_size() == len(SYSTEM) + 80
        assert unpin(h, "b") == 1
        assert h.tree.protected_size() == 0
        flood(h)
        assert not h.on_device("b")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("swap_out", ["on_evict", "eager"])
def test_a_document_pinned_on_host_stays_there_with_its_prefix(policy, swap_out):
    config = {"swap_out": swap_out}
    with harness(device_tokens=200, host_tokens=300, policy=policy, policy_config=config) as h:
        h.serve(*prompt("a", "b"))
        assert pin(h, "b", "host") == 1
        flood(h)
        assert not h.on_device("b")
        req = h.serve(*prompt("a", "b", question=5))
        assert req.cached_tokens_device + req.cached_tokens_host == len(SYSTEM) + 80
        flood(h)
        assert h.on_host("b")
        assert unpin(h, "b") == 1
        flood(h)
        assert not h.on_host("b")


def test_over_budget_nothing_is_pinned_and_the_budget_is_named():
    config = {"pin_device_share": 0.25, "pin_host_share": 0.1}
    with harness(device_tokens=480, host_tokens=600, policy_config=config) as h:
        for name in ("a", "b", "c"):
            h.serve(*prompt(name))
        pin(h, "a")
        pin(h, "b")  # the system prompt is counted once: 20 + 40 + 40
        with pytest.raises(ControlError, match=r"device tier's budget for pins is 120 tokens, 100"):
            pin(h, "c")
        with pytest.raises(ControlError, match=r"pin_device_share=0\.25"):
            pin(h, "c")
        assert not h.tree.control.is_pinned(h.ends()["c"].occurrences[0].document)
        assert pin(h, "a", "host") == 1  # in place of the pin on the device
        assert pin(h, "c") == 1
        with pytest.raises(ControlError, match="host tier's budget for pins is 60 tokens, 60"):
            pin(h, "b", "host")
        assert [each["id"] for each in h.tree.control.pins()] == ["a", "b", "c"]


def test_a_request_of_the_greatest_length_always_finds_room():
    with harness(device_tokens=480, policy_config={"pin_device_share": 0.9}) as h:
        h.serve(*prompt("a"))
        h.tree.control.longest_request_tokens = 430
        with pytest.raises(ControlError, match="budget for pins is 50 tokens"):
            pin(h, "a")
        h.tree.control.longest_request_tokens = 600
        assert pinned(h, "device")["budget_tokens"] == 0


def test_without_a_host_tier_nothing_is_pinned_there():
    with harness(device_tokens=480) as h:
        h.serve(*prompt("a"))
        with pytest.raises(ControlError, match="no host tier"):
            pin(h, "a", "host")


def test_what_isnt_cached_isnt_pinned():
    with harness(device_tokens=480) as h:
        h.serve(*prompt("a"), version="1")
        assert pin(h, "b") == pin(h, "a", version="2") == 0
        assert h.tree.control.pins() == []
        assert pin(h, "a", version="1") == 1
        assert unpin(h, "a", version="2") == unpin(h, "b") == unpin(h, "a", namespace="x") == 0
        assert unpin(h, "a") == 1


def test_new_places_of_a_pinned_document_are_kept_as_far_as_the_budget_reaches():
    with harness(device_tokens=800, policy_config={"pin_device_share": 0.25}) as h:
        h.serve(*prompt("a"))
        pin(h, "a")
        h.serve(*prompt("b", "a"))
        state = pinned(h, "device")
        assert (state["places"], state["pinned_tokens"]) == (2, 140)
        h.serve(*prompt("c", "d", "a"))
        state = pinned(h, "device")
        assert (state["places"], state["pinned_tokens"], state["skipped_places"]) == (2, 140, 1)
        h.check()


def test_a_pin_survives_a_flush_and_holds_what_comes_after_it():
    with harness(device_tokens=800) as h:
        h.serve(*prompt("a"))
        pin(h, "a")
        h.tree.reset()
        h.allocator.clear()
        assert pinned(h, "device")["places"] == 0
        h.serve(*prompt("a"))
        assert pinned(h, "device")["places"] == 1
        assert unpin(h, "a") == 1


@pytest.mark.parametrize("tier", ["device", "host"])
def test_an_invalidated_document_goes_although_it_is_pinned(tier):
    with harness(device_tokens=800, host_tokens=800) as h:
        h.serve(*prompt("a", "b"))
        pin(h, "b", tier)
        h.poll()
        h.tree.control.invalidate(Selector(id="a"))
        h.check()
        assert h.tree.control.report()["retired_nodes"] == 0
        assert pinned(h, tier)["places"] == 0
        h.serve(*prompt("a", "b"))
        assert pinned(h, tier)["places"] == 1


def test_pins_end_when_the_callers_clock_says_so():
    with harness(device_tokens=1600) as h:
        for name, expires_s in (("a", 10.0), ("b", 20.0), ("c", None)):
            h.serve(*prompt(name))
            pin(h, name, expires_s=expires_s)
        assert h.tree.control.expire_pins(9.9) == 0
        assert h.tree.control.expire_pins(10.0) == 1
        pin(h, "b", expires_s=30.0)  # in place of the earlier one
        assert h.tree.control.expire_pins(20.0) == 0
        assert [each["id"] for each in h.tree.control.pins()] == ["b", "c"]
        assert h.tree.control.expire_pins(1e9) == 1
        assert pinned(h, "device")["places"] == 1


def test_two_pins_of_the_same_place_are_given_up_one_after_the_other():
    with harness(device_tokens=1600, host_tokens=1600) as h:
        h.serve(*prompt("a"), version="1")
        pin(h, "a")
        pin(h, "a", version="1")
        assert pinned(h, "device")["places"] == 1
        assert unpin(h, "a", version="1") == 1
        assert pinned(h, "device")["places"] == 1
        assert unpin(h, "a") == 1
        assert pinned(h, "device")["places"] == 0


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_pin_that_is_taken_back_leaves_those_that_were_there(tier):
    with harness(device_tokens=1600, host_tokens=1600) as h:
        h.serve(*prompt("a"), version="1")
        pin(h, "a", "host", version="1")
        pin(h, "a", tier)
        h.tree.control.undo_pin(Selector(id="a"), None)
        h.check()
        (left,) = h.tree.control.pins()
        assert (left["version"], left["tier"]) == ("1", "host")
        assert pinned(h, "host")["places"] == 1
        assert pinned(h, "device")["places"] == 0


def test_a_pin_that_is_taken_back_gives_its_place_to_the_one_before():
    with harness(device_tokens=1600, host_tokens=1600) as h:
        h.serve(*prompt("a"))
        pin(h, "a", expires_s=10.0)
        earlier = h.tree.control.pin_of(Selector(id="a"))
        pin(h, "a", "host")
        h.tree.control.undo_pin(Selector(id="a"), earlier)
        h.check()
        (left,) = h.tree.control.pins()
        assert (left["tier"], left["expires_s"]) == ("device", 10.0)
        assert [pinned(h, tier)["places"] for tier in ("device", "host")] == [1, 0]
        unpin(h, "a")
        h.tree.control.undo_pin(Selector(id="a"), earlier)  # it was given up meanwhile
        assert h.tree.control.pins() == []


def test_what_was_pinned_before_comes_back_as_far_as_the_budget_reaches():
    config = {"pin_device_share": 0.25}
    with harness(device_tokens=320, host_tokens=1600, policy_config=config) as h:
        h.serve(*prompt("a"))
        h.serve(*prompt("b"))
        pin(h, "a")
        earlier = h.tree.control.pin_of(Selector(id="a"))
        pin(h, "a", "host")
        pin(h, "b")  # takes the budget meanwhile
        h.tree.control.undo_pin(Selector(id="a"), earlier)
        h.check()
        state = pinned(h, "device")
        assert (state["places"], state["skipped_places"]) == (1, 1)
        assert pinned(h, "host")["places"] == 0


def test_a_schedulers_pin_says_what_it_takes_the_place_of_and_can_be_undone():
    with harness(device_tokens=1600, host_tokens=1600) as h:
        h.serve(*prompt("a"))
        scheduler = SimpleNamespace(tree_cache=h.tree)

        def act(action, body):  # as it comes there and back
            with get_parallel().override(attn_dp_rank=0, dp_rank=0):
                return orjson.loads(orjson.dumps(ACTIONS[action](scheduler, body)))

        order = {"selector": {"id": "a"}, "tier": "device", "expires_s": 5.0}
        first = act("pin", order)
        assert first == {"places": 1, "rank": 0, "earlier": None}
        second = act("pin", {**order, "tier": "host"})
        undo = {"selector": {"id": "a"}, "earlier": {"1": None}}
        act("undo_pin", undo)  # of another scheduler's
        assert h.tree.control.pins()[0]["tier"] == "host"
        act("undo_pin", {**undo, "earlier": {"0": second["earlier"]}})
        assert h.tree.control.pins() == [{"id": "a", "tier": "device", "expires_s": 5.0}]
        act("undo_pin", {**undo, "earlier": {"0": None}})
        assert h.tree.control.pins() == []


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_pinned_place_stays_although_its_node_has_forgotten_the_name(tier):
    with harness(device_tokens=1600, host_tokens=1600) as h:
        tokens, ((_, start, end),) = prompt("a")
        h.serve(tokens, [("a", start, end)])
        h.serve(*prompt("b"))
        pin(h, "a", tier)
        for number in range(8):  # the same text under other ids
            h.serve(tokens, [(f"other {number}", start, end)])
        assert "a" not in h.ends()
        pin(h, "b", tier)
        unpin(h, "b")
        assert pinned(h, tier)["places"] == 1
        assert unpin(h, "a") == 1
        assert pinned(h, tier)["places"] == 0


def test_a_pinned_path_may_be_cut():
    with harness(device_tokens=1600, host_tokens=1600) as h:
        tokens, spans = prompt("a", "b")
        h.serve(tokens, [("ab", 20, 100)])
        pin(h, "ab")
        pin(h, "ab", "host")
        h.poll()
        h.serve(tokens, spans)
        h.serve(*prompt("a", "c"))
        h.check()
        assert unpin(h, "ab") == 1
        h.check()
        assert h.tree.protected_size() == 0


def test_copying_one_place_of_a_pinned_document_leaves_the_others():
    config = {"pin_host_share": 0.9}
    with harness(device_tokens=200, host_tokens=160, policy="lru", policy_config=config) as h:
        h.serve(*prompt("b", "a"))
        h.serve(*prompt("a"))
        for question, other in enumerate("lmno"):
            h.serve(*prompt(other))
            h.serve(*prompt("b", "a", question=question))
        # The one is on the device alone, the other on host alone, which is full.
        assert pin(h, "a", "host") == 2
        assert pinned(h, "host")["places"] == 2
