"""What is counted, when, and what splits, retries and speculations do to it."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel
from tree_harness import harness
from unit.tree.prompts import document, prompt

from rag_radix.policies.base import TierName
from rag_radix.statistics import DocumentFrequencies, DocumentKey


def frequencies(h, names):
    return [h.ends()[name].statistics.frequency for name in names]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [None, 16, 64])
def test_a_retrieval_counts_each_node_of_its_path_once(page_size, chunk):
    with harness(device_tokens=1000, page_size=page_size) as h:
        tokens, spans = prompt("a", "b", question_tokens=33)
        for _ in range(3):
            h.serve(tokens, spans, chunk=chunk)
        assert frequencies(h, "ab") == [3, 3]
        prompt_nodes = [n for n in h.nodes() if n.statistics.frequency]
        # The last token of a prompt is never matched, so its node may have been cut.
        assert {n.statistics.frequency for n in prompt_nodes} <= {1, 2, 3}
        assert h.tree.counters.requests == 3
        assert h.tree.counters.documents == 6


def test_hits_and_misses_count_alike_and_tiers_are_told_apart():
    with harness(device_tokens=130, host_tokens=520) as h:
        for names in (("a", "b"), ("c", "d"), ("a", "b")):
            h.serve(*prompt(*names))
        counters = h.tree.counters
        assert counters.documents == 6
        assert counters.host_hit_documents == 2
        assert counters.device_hit_documents == 0
        assert counters.host_hit_tokens == 80
        assert counters.device_hit_tokens == 20 + 20


def test_document_frequency_survives_the_node_and_not_a_flush():
    with harness(device_tokens=130) as h:
        h.serve(*prompt("a"))
        h.serve(*prompt("a"))
        h.serve(*prompt("b", "c"))
        assert "a" not in h.ends()
        h.serve(*prompt("a"))
        statistics = h.ends()["a"].statistics
        assert (statistics.frequency, statistics.document_frequency) == (1, 3)
        h.tree.reset()
        h.allocator.clear()
        h.serve(*prompt("a"))
        assert h.ends()["a"].statistics.document_frequency == 1


def test_only_requests_that_computed_a_node_add_to_its_cost():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a", "b")
        for question in range(3):
            h.serve(*prompt("a", "b", question=question))
        statistics = h.ends()["a"].statistics
        cost = h.tree.settings.prefill_cost(0, len(tokens))
        assert statistics.cost_samples == 1
        assert statistics.mean_cost_per_token_s == pytest.approx(cost / len(tokens))
        assert spans


def test_a_document_behind_a_cached_prefix_costs_what_it_took_behind_it():
    with harness(device_tokens=1000) as h:
        h.serve(*prompt("a"))
        tokens, _ = served = prompt("a", "b")
        req = h.serve(*served)
        hit = req.cached_tokens_device
        new = len(tokens) - hit
        assert hit == 60
        cost = h.tree.settings.prefill_cost(hit, new) / new
        assert h.ends()["b"].statistics.mean_cost_per_token_s == pytest.approx(cost)


def test_the_document_retrieved_longest_ago_is_forgotten_first():
    frequencies = DocumentFrequencies(capacity=2)
    for name in "abac":
        frequencies.record(DocumentKey(name))
    assert len(frequencies) == 2
    assert frequencies.record(DocumentKey("a")) == 3
    assert frequencies.record(DocumentKey("b")) == 1


def test_both_halves_of_a_split_keep_all_statistics():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    with harness(device_tokens=1000, host_tokens=1000) as h:
        tokens, spans = prompt("a")
        h.serve(tokens, spans)
        h.serve(tokens, spans)
        whole = h.ends()["a"]
        known = whole.statistics.copy()
        assert h.tree.evict(EvictParams(num_tokens=50)).num_tokens_evicted >= 47
        assert (whole.evicted, whole.host_copies) == (True, 1)
        partial = [*tokens[:40], 3, 4, 5]
        req = h.request(partial)
        req.init_next_round_input(h.tree)  # matching alone splits
        assert len(whole.key) == 20
        upper = whole.parent
        assert upper.statistics == whole.statistics == replace(known, tokens=20, has_host_copy=True)
        assert upper.statistics is not whole.statistics
        for name in ("is_tail", "matched", "host_copies", "host_reclaims", "ranks"):
            assert getattr(upper, name) == getattr(whole, name)
        h.check()


def test_a_head_that_documents_share_counts_as_the_one_retrieved_most():
    with harness(device_tokens=1000) as h:
        heading = document("heading", 10)
        for name in "xxxy":
            h.serve([*heading, *document(name, 30), 7], [(name, 0, 40)])
        head = h.ends()["x"].parent
        assert h.ends()["y"].parent is head
        assert head.statistics.document_frequency == 3
        assert h.ends()["y"].statistics.document_frequency == 1


def test_neither_question_nor_output_counts_as_a_document_and_output_as_no_use():
    with harness(device_tokens=1000) as h:
        h.serve(*prompt("a"))
        (question,) = h.ends()["a"].children.values()
        (output,) = question.children.values()
        assert (question.statistics.frequency, question.statistics.document_frequency) == (1, 0)
        assert output.statistics.frequency == 0


def test_matching_for_the_queue_counts_nothing():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a")
        h.serve(tokens, spans)
        req = h.request(tokens, spans)
        for _ in range(5):
            req.init_next_round_input(h.tree)
        assert frequencies(h, "a") == [1]
        assert h.tree.counters.requests == 1


def test_a_retracted_request_is_counted_once_and_still_gets_its_documents_named():
    with harness(device_tokens=400) as h:
        tokens, spans = prompt("a", "b")
        req = h.request(tokens, spans)
        h.admit(req)
        h.compute(req, 64)
        h.publish(req)
        h.drop(req)
        req.reset_for_retract()
        h.serve(*prompt(*"xyzuvwtsr"))  # drives the rest out
        assert "a" not in h.ends()
        h.admit(req)
        h.compute(req)
        h.publish(req)
        h.finish(req)
        h.check()
        assert {"a", "b"} <= set(h.ends())
        assert h.tree.document_frequencies.record(req.rag_retrieval.document_key(0)) == 2
        assert h.tree.counters.requests == 2


def test_what_a_retracted_request_computes_again_is_worth_as_much_as_before():
    with harness(device_tokens=400) as h:
        tokens, spans = prompt("a", "b")
        h.serve(*prompt("a"))
        req = h.request(tokens, spans)
        h.admit(req)
        h.compute(req)
        h.publish(req)
        h.decode(req, 1)
        before = [h.ends()[name].statistics for name in "ab"]
        h.drop(req)
        req.reset_for_retract()
        h.serve(*prompt(*"xyzuvwtsr"))  # drives the rest out
        assert "a" not in h.ends()
        h.admit(req)
        h.compute(req)
        h.publish(req)
        after = [h.ends()[name].statistics for name in "ab"]
        assert [s.document_frequency for s in after] == [s.document_frequency for s in before]
        assert [s.frequency for s in after] == [1, 1]
        assert all(s.mean_cost_per_token_s > 0 for s in after)
        assert h.tree.counters.requests == 3
        h.finish(req)
        h.check()


def test_a_retracted_request_that_finds_its_nodes_again_counts_them_no_more():
    with harness(device_tokens=400) as h:
        tokens, spans = prompt("a", "b")
        req = h.request(tokens, spans)
        h.admit(req)
        h.compute(req, 64)
        h.publish(req)
        h.drop(req)
        req.reset_for_retract()
        h.admit(req)
        h.compute(req)
        h.publish(req)
        assert frequencies(h, "ab") == [1, 1]
        h.finish(req)
        h.check()


def test_a_document_within_a_page_is_a_hit_only_when_its_page_was():
    with harness(device_tokens=400, page_size=16) as h:
        tokens, spans = prompt("a", tokens=5)  # all of it in the second page, [16, 32)
        h.serve(tokens, spans)
        assert h.tree.counters.device_hit_documents == 0
        h.serve([*tokens[:20], 3, 4, 5], [("other", 20, 22)])
        assert h.tree.counters.device_hit_tokens == 16
        assert h.tree.counters.device_hit_documents == 0
        h.serve([*tokens, *range(20)], spans)
        assert h.tree.counters.device_hit_documents == 1


def test_parallel_samples_are_one_retrieval():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a")
        h.serve(tokens, spans, n=3, max_new_tokens=0, output=())
        for _ in range(3):
            h.serve(tokens, spans, n=3)
        assert frequencies(h, "a") == [1]
        assert h.tree.counters.requests == 1


def test_what_repeats_a_counted_retrieval_counts_as_none():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a")
        for counts in (True, False):
            req = h.request(tokens, spans)
            req.sampling_params.custom_params["rag"]["counts"] = counts
            h.admit(req)
            h.compute(req)
            h.publish(req)
            h.finish(req)
        assert frequencies(h, "a") == [1]
        assert (h.tree.counters.requests, h.tree.counters.documents) == (1, 1)


def test_what_is_answered_with_an_error_counts_and_names_nothing():
    with harness(device_tokens=400) as h, get_parallel().override(tp_rank=0):
        req = h.request(range(50), [("a", 0, 1), ("b", 1, 40)])
        req.set_finish_with_abort("no such adapter")
        h.admit(req)
        h.compute(req)
        h.publish(req)
        h.finish(req, aborted=True)
        counters = h.tree.counters
        assert (counters.requests, counters.documents, counters.prompt_tokens) == (0, 0, 0)
        assert len(h.tree.document_frequencies) == 0
        assert h.nodes() == []
        h.check()


def test_what_its_client_aborts_counts():
    with harness(device_tokens=400) as h:
        req = h.request(*prompt("a", "b"))
        h.admit(req)
        h.compute(req, 60)
        h.publish(req)
        req.to_finish = FINISH_ABORT()
        req.init_next_round_input()
        h.tree.control.started([req])
        h.compute(req)
        h.finish(req, aborted=True)
        assert (h.tree.counters.requests, h.tree.counters.documents) == (1, 2)
        h.check()


def test_a_document_read_only_by_a_speculation_gets_a_cost_when_it_is_used():
    with harness(device_tokens=1000) as h:
        guess = h.request(*prompt("a"), speculative=True)
        h.admit(guess)
        h.compute(guess)
        h.publish(guess)
        h.finish(guess, aborted=True)
        h.serve(*prompt("a", question=2))
        statistics = h.ends()["a"].statistics
        alone = h.tree.settings.prefill_cost(20, 40) / 40
        assert statistics.mean_cost_per_token_s == pytest.approx(alone)


def test_a_tail_is_matched_by_a_hit_and_by_being_built_on():
    with harness(device_tokens=1000) as h:
        first = prompt("a")
        h.serve(*first)
        question = [n for n in h.nodes() if n.is_tail]
        assert not any(n.matched for n in question)
        turn = [*first[0], 9_000_001, 9_000_002, *document("next", 5)]
        h.serve(turn, first[1])
        assert [n for n in h.nodes() if n.is_tail and n.matched]

    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a")
        twins = [h.request(tokens, spans) for _ in range(2)]
        for twin in twins:
            h.admit(twin)
            h.compute(twin)
        for twin in twins:
            h.publish(twin)
        (question,) = [n for n in h.nodes() if n.is_tail]
        assert question.matched
        for twin in twins:
            h.finish(twin)
        h.check()


def test_a_request_does_not_match_its_own_chunks():
    with harness(device_tokens=1000) as h:
        h.serve(*prompt("a", question_tokens=100), chunk=16)
        assert not any(n.matched for n in h.nodes())


def test_a_node_that_a_storage_backend_brings_is_ranked_like_any_other():
    from sglang.srt.mem_cache.radix_cache import RadixKey

    with harness(device_tokens=400, host_tokens=400) as h:
        core, pool = h.tree.tree_core, h.tree.cache_controller.mem_pool_host
        key = RadixKey(array("q", document("stored")), None)
        result = core.insert_host(core.root_node.id, key, pool.alloc(40), [])
        node = core.node_by_id(result.inserted_host_node)
        assert node.statistics.tokens == 40
        assert node in core.evictable_host_leaves
        assert node.offered[TierName.HOST] == node.ranks[TierName.HOST]
        assert h.tree.component.host.pop() is node


def test_what_sglang_inserts_by_itself_is_ranked_like_any_other():
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    with harness(device_tokens=400) as h:
        key = RadixKey(array("q", document("x")), None)
        h.tree.insert(InsertParams(key=key, value=h.allocator.alloc(40)))
        (node,) = h.nodes()
        assert node.statistics.tokens == 40
        assert node.offered[TierName.DEVICE] == node.ranks[TierName.DEVICE]
        h.tree.check_integrity()
        assert h.tree.component.device.pop() is node


def test_a_request_whose_kv_ranks_share_out_is_inserted_by_sglang_and_counted_alike():
    with harness(device_tokens=1000) as h:
        for _ in range(2):
            req = h.request(*prompt("a", "b"))
            req.kv_rotation_base = 0
            h.admit(req)
            h.compute(req)
            h.publish(req)
            h.finish(req)
            h.check()
        assert h.ends()["a"].statistics.frequency == h.ends()["b"].statistics.frequency == 2
        assert {node.rotation_base for node in h.nodes()} == {0}


def test_an_output_that_a_later_prompt_computes_again_has_a_cost_of_both():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a")
        output = [9_000_001, 9_000_002, 9_000_003]
        first = h.request(tokens, spans)
        h.admit(first)
        h.compute(first)
        h.publish(first)
        # Its prompt goes on with an answer that isn't in the tree yet.
        second = h.request([*tokens, *output, 9_000_009], spans)
        h.admit(second)
        for token in output:
            h.decode(first, token)
        h.finish(first)
        h.compute(second)
        h.publish(second)
        h.finish(second)
        h.check()
        assert 2 in {node.statistics.cost_samples for node in h.nodes()}
