"""When a document is copied to host, who waits for it, and what is left uncopied."""

from __future__ import annotations

import pytest
from tree_harness import harness
from unit.tree.prompts import document, prompt

from rag_radix.errors import ConfigError
from rag_radix.replay.trace import TraceDocument, read_trace
from rag_radix.settings import parse_settings
from rag_radix.statistics import namespace_name


def evict(h, tokens):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return h.tree.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted


def alone(h, name, tokens=40):
    """A prompt of one document and a question of one token."""
    return h.serve([*document(name, tokens), 1], [(name, 0, tokens)], output=())


class Waits:
    """Counts how often the tree waits for copies, and how many it submits."""

    def __init__(self, h, monkeypatch):
        self.waits, self.submissions = 0, 0
        controller, tree = h.tree.cache_controller, h.tree
        submit, wait = controller.start_writing, type(tree).__mro__[1].writing_check

        def start_writing():
            self.submissions += bool(controller.write_queue)
            submit()

        def writing_check(this, write_back=False, finish_count=None):
            self.waits += write_back
            wait(this, write_back, finish_count)

        monkeypatch.setattr(controller, "start_writing", start_writing)
        monkeypatch.setattr(type(tree).__mro__[1], "writing_check", writing_check)


def test_the_copies_of_an_eviction_are_submitted_and_waited_for_as_one(monkeypatch):
    with harness(device_tokens=400, host_tokens=800) as h:
        for name in "abcd":
            alone(h, name)
        waits = Waits(h, monkeypatch)
        assert evict(h, 1000) >= 160
        assert all(h.on_host(name) for name in "abcd")
        assert (waits.waits, waits.submissions) == (1, 1)
        h.check()


def test_slots_are_given_back_only_when_their_copies_are_done(monkeypatch):
    with harness(device_tokens=400, host_tokens=800) as h:
        for name in "abcd":
            alone(h, name)
        free = h.allocator.available_size()
        seen = []
        base = type(h.tree).__mro__[1]
        wait = base.writing_check

        def writing_check(this, *args, **kwargs):
            # The copies are only submitted here; nothing may be reused before.
            seen.append(h.allocator.available_size())
            wait(this, *args, **kwargs)

        monkeypatch.setattr(base, "writing_check", writing_check)
        evict(h, 100)
        assert seen == [free]
        assert h.allocator.available_size() >= free + 100
        h.check()


def test_an_eager_copy_leaves_nothing_to_copy_or_wait_for(monkeypatch):
    config = {"swap_out": "eager"}
    with harness(device_tokens=400, host_tokens=800, policy_config=config) as h:
        for name in "abcd":
            alone(h, name)
        assert all(h.on_host(name) and h.on_device(name) for name in "abcd")
        assert not any(n.backuped for n in h.nodes() if n.is_tail)
        assert h.tree.tree_core.swapped_out_tokens == 160
        waits = Waits(h, monkeypatch)
        assert evict(h, 1000) >= 160
        assert (waits.waits, waits.submissions) == (0, 0)
        assert h.tree.tree_core.swapped_out_tokens == 160
        h.check()
        assert alone(h, "a").cached_tokens_host == 40


def test_an_eager_copy_of_a_tail_waits_for_its_second_use():
    with harness(device_tokens=400, host_tokens=800, policy_config={"swap_out": "eager"}) as h:
        tokens, spans = prompt("a")
        h.serve(tokens, spans, output=(7, 8, 9))
        assert not any(n.backuped for n in h.nodes() if n.is_tail)
        h.serve([*tokens, 7, 8, 5], spans)
        assert [len(n.key) for n in h.nodes() if n.is_tail and n.backuped]
        h.check()


def test_eager_copies_in_flight_lock_a_quarter_of_the_device_at_most():
    config = {"swap_out": "eager"}
    with harness(device_tokens=400, host_tokens=800, policy_config=config) as h:
        h.hold_copies()
        for name in "abcd":
            alone(h, name)
        assert h.tree.swap_out._tokens_in_flight() == 80
        assert h.tree.protected_size() == 80
        # What could not be begun then is copied at its eviction, and all that is asked for
        # leaves, the locked ones after their copies.
        assert evict(h, 1000) >= 160
        assert all(h.on_host(name) and not h.on_device(name) for name in "abcd")
        h.check()


def test_a_document_too_large_to_copy_ahead_keeps_no_other_from_it():
    config = {"swap_out": "eager"}
    with harness(device_tokens=400, host_tokens=800, policy_config=config) as h:
        tokens = [*document("a"), *document("large", 120), *document("b"), 1]
        h.serve(tokens, [("a", 0, 40), ("large", 40, 160), ("b", 160, 200)], output=())
        assert [h.on_host(name) for name in ("a", "large", "b")] == [True, False, True]
        evict(h, 1000)  # it is copied when it leaves, with its parent or without
        assert all(h.on_host(name) and not h.on_device(name) for name in ("a", "large", "b"))
        h.check()


def test_a_device_tier_of_two_prompts_does_not_starve_on_eager_copies():
    config = {"swap_out": "eager"}
    with harness(device_tokens=130, host_tokens=800, policy_config=config) as h:
        h.hold_copies()
        for step in range(6):
            h.serve(*prompt(f"x{step}", f"y{step}"))
        assert h.tree.counters.requests == 6


def test_a_node_that_cannot_fit_is_dropped_and_costs_the_host_nothing():
    with harness(device_tokens=400, host_tokens=100) as h:
        alone(h, "a")
        alone(h, "b")
        evict(h, 400)
        assert h.on_host("a")
        assert h.on_host("b")
        alone(h, "large", 150)
        evict(h, 400)
        assert "large" not in h.ends()
        assert h.on_host("a")
        assert h.on_host("b")
        h.check()


def test_a_parent_may_leave_the_host_after_its_only_child():
    with harness(device_tokens=400, host_tokens=80) as h:
        tokens = [*document("a"), *document("b"), 1]
        h.serve(tokens, [("a", 0, 40), ("b", 40, 80)], output=())
        evict(h, 400)
        assert h.on_host("a")
        assert h.on_host("b")
        for _ in range(3):
            alone(h, "c", 70)
        evict(h, 400)
        assert h.on_host("c")
        assert set(h.ends()) == {"c"}
        h.check()


def test_host_victims_that_are_not_needed_stay_candidates():
    with harness(device_tokens=400, host_tokens=80) as h:
        alone(h, "a")
        alone(h, "b")
        evict(h, 400)
        component = h.tree.component
        assert component.choose_host_victims(1000) is None
        chosen = component.choose_host_victims(50)
        assert [len(n.key) for n in chosen.leaves] == [40, 40]
        component.keep(chosen)
        h.check()
        assert h.tree.evict_host(1000) == 80


def test_documents_beyond_max_depth_belong_to_the_tail():
    tokens, spans = prompt("a", "b", "c")
    with harness(device_tokens=1000, host_tokens=1000, policy_config={"max_depth": 2}) as h:
        h.serve(tokens, spans)
        assert set(h.ends()) == {"a", "b"}
        assert h.tree.counters.documents == 3
        h.serve(tokens, spans)
        assert h.tree.counters.device_hit_documents == 3  # the same prompt again
        h.serve(*prompt("x", "y", "z"))
        evict(h, 1000)
        assert {name for name in "abxy" if h.on_host(name)} == set("abxy")
        assert h.tree.counters.dropped_tail_tokens > 40  # "z" and its question
        h.check()


def test_a_trace_has_spans_and_lengths_and_can_be_read_back(tmp_path):
    path = tmp_path / "trace.jsonl"
    tokens, spans = prompt("a", "b")
    with harness(device_tokens=1000, policy_config={"trace": str(path)}) as h:
        h.serve(tokens, spans, output=(7, 8))
        h.serve(tokens, spans, extra_key="tenant")
        guess = h.request(tokens, spans, speculative=True)
        h.admit(guess)
        h.compute(guess)
        h.publish(guess)
        h.finish(guess, aborted=True)
        h.serve([1, 2, 3])
    first, second, third = read_trace(path)
    assert first.documents == tuple(TraceDocument(n, "", start, end) for n, start, end in spans)
    assert (first.prompt_tokens, first.output_tokens, first.namespace) == (len(tokens), 2, "")
    assert second.namespace not in ("", "tenant")
    assert third.documents == ()
    assert first.arrival_s <= second.arrival_s <= third.arrival_s


def test_a_trace_says_which_part_of_a_prompt_is_shared(tmp_path):
    path = tmp_path / "trace.jsonl"
    tokens, spans = prompt("public", "private")
    with harness(device_tokens=1000, policy_config={"trace": str(path)}) as h:
        for key, salt, salt_from in (
            (None, "s", 1),
            ("k", "s", 0),
            ("k", "s", None),
            ("k", None, None),
        ):
            h.serve(tokens, spans, extra_key=key, cache_salt=salt, salt_from=salt_from)
    names = [(each.namespace, each.shared_namespace) for each in read_trace(path)]
    keyed, salted = namespace_name("k", None), namespace_name("k", "s")
    assert names == [(namespace_name(None, "s"), ""), *[(salted, keyed)] * 2, (keyed, keyed)]
    assert [each.shared_tokens for each in read_trace(path)] == [spans[0][2], spans[0][1], 0, 0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"swap_out": "lazily"}, "swap_out='lazily'.*'on_evict', 'hot' or 'eager'"),
        ({"max_depth": 0}, "max_depth=0.*at least 1"),
        ({"max_depth": True}, "max_depth=True"),
        ({"trace": 3}, "trace=3.*name of a file"),
    ],
)
def test_wrong_settings_are_named_with_a_remedy(config, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings("pgdsf", config, lambda: None)
