"""Situations that each once broke a real system; none may leak, corrupt, hang or starve."""

from __future__ import annotations

import pytest
from tree_harness import harness
from unit.tree.prompts import SYSTEM, document, prompt

from rag_radix.sglang_compat import ComponentType


def test_a_key_shorter_than_a_page_matches_nothing():
    with harness(device_tokens=256, page_size=16) as h:
        tokens, spans = prompt("a")
        h.serve(tokens, spans)
        req = h.serve(tokens[:9], [])
        assert req.cached_tokens_device == 0


@pytest.mark.parametrize("published_chunks", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
def test_dropping_a_request_between_chunks_leaks_and_corrupts_nothing(published_chunks, page_size):
    with harness(device_tokens=320, host_tokens=640, page_size=page_size) as h:
        tokens, spans = prompt("a", "b")
        req = h.request(tokens, spans)
        h.admit(req)
        for _ in range(published_chunks):
            h.compute(req, 48)
            h.publish(req)
        h.compute(req, 48)
        h.drop(req)
        h.check()
        again = h.serve(tokens, spans)
        assert again.cached_tokens_device == 48 * published_chunks // page_size * page_size


def test_dropping_a_request_around_its_load_back_leaks_nothing():
    with harness(device_tokens=130, host_tokens=520) as h:
        a = prompt("a", "b")
        h.serve(*a)
        h.serve(*prompt("c", "d"))
        matched = h.request(*a)
        matched.init_next_round_input(h.tree)
        assert matched.host_hit_length > 0
        h.check()  # the request goes away here: matching holds nothing
        loaded = h.request(*a)
        h.admit(loaded)
        h.compute(loaded)
        h.drop(loaded)
        h.check()
        assert h.serve(*a).cached_tokens_device >= 80


def test_a_prefix_published_between_match_and_load_back_is_used_not_loaded_over():
    with harness(device_tokens=300, host_tokens=600) as h:
        a = prompt("a", "b")
        h.serve(*a)
        h.serve(*prompt("c", "d", "e", "f", "g"))
        waiting = h.request(*a)
        waiting.init_next_round_input(h.tree)
        assert waiting.host_hit_length > 0
        h.serve(*a)  # loads the same prefix back and publishes
        h.admit(waiting)
        assert waiting.prefix_len == len(a[0]) - 1
        h.compute(waiting)
        h.publish(waiting)
        h.finish(waiting)
        h.check()


def test_a_load_back_whose_nodes_were_computed_again_meanwhile_loads_nothing():
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

    with harness(device_tokens=300, host_tokens=600) as h:
        a = prompt("a", "b")
        h.serve(*a)
        h.serve(*prompt("c", "d", "e", "f", "g"))
        waiting = h.request(*a)
        waiting.init_next_round_input(h.tree)
        promised = waiting.host_hit_length
        h.serve(*a)
        loaded_before = h.tree.tree_core.loaded_back_tokens
        loaded, _ = h.tree.init_load_back(
            InitLoadBackParams(
                best_match_node=waiting.best_match_node, host_hit_length=promised, req=waiting
            )
        )
        assert loaded in (0, promised)
        assert h.tree.tree_core.loaded_back_tokens == loaded_before
        h.poll()
        h.check()


def test_a_host_tier_full_of_device_copies_still_lets_everything_run():
    with harness(device_tokens=130, host_tokens=131) as h:
        for names in (("a", "b"), ("c",), ("a", "b"), ("c",)):
            h.serve(*prompt(*names))
        for step in range(5):
            h.serve(*prompt(f"n{step}", f"m{step}"))
            h.serve(*prompt("a", "b"))


def test_slots_are_freed_only_after_the_copy_from_them_has_finished():
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    with harness(device_tokens=130, host_tokens=520) as h:
        events = []
        controller, allocator = h.tree.cache_controller, h.allocator
        start, free = controller.start_writing, allocator.free_segment

        def start_writing():
            queued = len(controller.write_queue)
            start()
            if queued:
                ack = controller.ack_write_queue[-1]
                finish = ack.finish_event

                class Watched:
                    def synchronize(self):
                        finish.synchronize()
                        events.append("copied")

                    def query(self):
                        return finish.query()

                controller.ack_write_queue[-1] = ack._replace(finish_event=Watched())
                events.append("copying")

        def free_segment(indices, **kwargs):
            events.append("freed")
            return free(indices, **kwargs)

        for name in "ab":
            h.serve([*document(name), 1], [(name, 0, 40)], output=())
        controller.start_writing, allocator.free_segment = start_writing, free_segment
        evict_from_tree_cache(h.tree, 130)
        # One copy of both documents; nothing is given back before it has begun, nor until it ends.
        assert events[:3] == ["copying", "copied", "freed"]
        assert set(events[3:]) <= {"freed"}
        assert h.allocator.available_size() == 130


def test_a_host_only_child_below_a_parent_without_a_copy_survives_and_is_not_leaked():
    with harness(device_tokens=130, host_tokens=520) as h:
        h.serve(*prompt("a", "b"))
        h.serve(SYSTEM + document("c", 50) + [1], [("c", 20, 70)])  # drives b out, not a
        parent, child = h.ends()["a"], h.ends()["b"]
        assert child.evicted
        assert child.backuped
        assert not parent.evicted
        assert not parent.backuped
        h.serve(*prompt("d", "e"))
        req = h.serve(*prompt("a", "b"))
        assert req.cached_tokens_host == 80


def test_a_victim_that_finds_no_room_on_host_goes_with_all_below_it():
    with harness(device_tokens=130, host_tokens=60) as h:
        for step in range(6):
            h.serve(*prompt(f"x{step}", f"y{step}"))
            h.serve(SYSTEM + document(f"z{step}", 50) + [1], [(f"z{step}", 20, 70)])


def test_an_allocation_evicts_its_shortfall_not_its_size():
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    with harness(device_tokens=1000) as h:
        for step in range(5):
            h.serve(*prompt(f"x{step}", f"y{step}"))
        free = h.allocator.available_size()
        wanted = free + 30
        evict_from_tree_cache(h.tree, wanted)
        assert wanted <= h.allocator.available_size() <= wanted + 40
        h.check()


def test_a_prompt_longer_than_a_chunk_with_room_for_little_more_gets_through():
    with harness(device_tokens=160, host_tokens=320, page_size=16) as h:
        for question in range(4):
            h.serve(*prompt("a", "b", question=question, question_tokens=40), chunk=16)
        assert h.tree.component.device.evicted_nodes > 0


def test_kv_of_every_page_survives_both_tiers_bit_for_bit():
    # `check`, run by every `serve`, compares the KV of each node with what was computed.
    for page_size in (1, 16):
        with harness(device_tokens=256, host_tokens=2048, page_size=page_size) as h:
            for round_ in range(3):
                for step in range(6):
                    h.serve(*prompt(f"x{step}", f"y{step}", "z", question=round_))
            assert h.tree.tree_core.loaded_back_tokens > 0
            full = ComponentType.FULL
            assert any(n.component_data[full].host_value is not None for n in h.nodes())
