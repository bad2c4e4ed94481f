"""A speculation counts when it is promoted, wherever it is then, exactly once."""

from __future__ import annotations

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from tree_harness import harness
from unit.tree.prompts import document, prompt

from rag_radix import speculation
from rag_radix.counters import SpeculationCounters
from rag_radix.replay.trace import read_trace
from rag_radix.statistics import DocumentKey


def prefill(h, req, chunk=None):
    h.admit(req)
    h.compute(req, chunk)
    h.publish(req)


def run(h, req):
    prefill(h, req)
    h.decode(req, 1)
    h.finish(req)


def frequency(h, name):
    return h.ends()[name].statistics.frequency


def retrievals(h, name):
    return h.tree.document_frequencies._counts.get(DocumentKey(name), 0)


def test_a_wrong_guess_counts_nothing_and_leaves_its_documents():
    with harness(device_tokens=1000) as h:
        guess = h.guess(*prompt("a"))
        run(h, guess)
        assert h.on_device("a")
        assert (frequency(h, "a"), retrievals(h, "a"), h.tree.counters.requests) == (0, 0, 0)
        assert h.tree.speculations.counters.wasted_tokens == len(guess.origin_input_ids) + 1
        h.check()


@pytest.mark.parametrize("policy", ["pgdsf", "pgdsf-plus"])
@pytest.mark.parametrize("moment", ["waiting", "prefilled", "decoding", "retracted", "ended"])
def test_a_promoted_one_counts_exactly_once_whenever_that_happens(policy, moment):
    with harness(device_tokens=1000, policy=policy) as h:
        h.serve(*prompt("a", question=2))
        guess = h.guess(*prompt("a", "b"))
        states = []

        def promote_at(now):
            if now == moment:
                states.append(h.tree.speculations.promote(guess.rid))

        promote_at("waiting")
        prefill(h, guess)
        promote_at("prefilled")
        if moment == "retracted":
            h.drop(guess)
            guess.reset_for_retract()
            promote_at("retracted")
            prefill(h, guess)
        h.decode(guess, 1)
        promote_at("decoding")
        h.finish(guess)
        promote_at("ended")
        assert states == ["finished" if moment == "ended" else "running"]
        for _ in range(2):
            assert h.tree.speculations.promote(guess.rid) == "finished"
        assert (frequency(h, "a"), frequency(h, "b")) == (2, 1)
        assert (retrievals(h, "a"), retrievals(h, "b")) == (2, 1)
        counters = h.tree.counters
        assert (counters.requests, counters.documents) == (2, 3)
        assert counters.device_hit_documents == 1
        assert counters.prompt_tokens == sum(len(prompt(*n)[0]) for n in (("a",), ("a", "b")))
        spent = h.tree.speculations.counters
        assert (spent.started, spent.promoted, spent.wasted_tokens) == (1, 1, 0)
        assert not h.tree.speculations.in_flight
        h.check()


def test_promoted_between_two_chunks_it_counts_what_comes_later_too():
    with harness(device_tokens=1000) as h:
        guess = h.guess(*prompt("a", "b"))
        prefill(h, guess, 64)
        assert h.tree.speculations.promote(guess.rid) == "running"
        assert (retrievals(h, "a"), retrievals(h, "b")) == (1, 1)
        h.compute(guess)
        h.publish(guess)
        h.finish(guess)
        assert (frequency(h, "a"), frequency(h, "b")) == (1, 1)
        assert (retrievals(h, "a"), retrievals(h, "b")) == (1, 1)


@pytest.mark.parametrize("moment", ["waiting", "decoding", "ended"])
def test_promoted_it_counts_nothing_where_its_client_says_so(moment):
    with harness(device_tokens=1000) as h:
        guess = h.request(*prompt("a"), speculative=True)
        guess.sampling_params.custom_params["rag"]["counts"] = False
        h.tree.speculations.start(guess)

        def promote_at(now):
            if now == moment:
                h.tree.speculations.promote(guess.rid)

        promote_at("waiting")
        prefill(h, guess)
        h.decode(guess, 1)
        promote_at("decoding")
        h.finish(guess)
        promote_at("ended")
        assert (frequency(h, "a"), retrievals(h, "a"), h.tree.counters.requests) == (0, 0, 0)
        spent = h.tree.speculations.counters
        assert (spent.promoted, spent.wasted_tokens) == (1, 0)


def test_what_has_left_the_tree_since_is_counted_as_a_retrieval_only():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    with harness(device_tokens=1000) as h:
        guess = h.guess(*prompt("a", "b"))
        run(h, guess)
        while "b" in h.ends():
            assert h.tree.evict(EvictParams(num_tokens=1)).num_tokens_evicted
        h.serve(*prompt("a", "b", question=2))  # other nodes of the same tokens
        assert h.tree.speculations.promote(guess.rid) == "finished"
        assert (frequency(h, "a"), frequency(h, "b")) == (2, 1)
        assert (retrievals(h, "a"), retrievals(h, "b")) == (2, 2)
        h.check()


def test_after_a_flush_a_promotion_still_counts_the_retrieval():
    with harness(device_tokens=1000) as h:
        guess = h.guess(*prompt("a"))
        run(h, guess)
        h.tree.reset()
        h.allocator.clear()
        assert h.tree.speculations.promote(guess.rid) == "finished"
        assert retrievals(h, "a") == 1


def test_what_is_on_host_by_then_is_counted_there():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    with harness(device_tokens=400, host_tokens=800) as h:
        h.serve(*prompt("a"))
        guess = h.guess(*prompt("a", "b"))
        run(h, guess)
        h.tree.evict(EvictParams(num_tokens=400))
        assert h.on_host("a")
        assert not h.on_device("a")
        assert h.tree.speculations.promote(guess.rid) == "finished"
        assert frequency(h, "a") == 2
        h.check()


def test_only_the_last_ones_that_have_ended_are_known(monkeypatch):
    monkeypatch.setattr(speculation, "_REMEMBERED", 2)
    with harness(device_tokens=1000) as h:
        guesses = [h.guess(document("a", 20), [("a", 0, 20)]) for _ in range(3)]
        for guess in guesses:
            run(h, guess)
        states = [h.tree.speculations.promote(guess.rid) for guess in guesses]
        assert states == ["unknown", "finished", "finished"]


def test_an_aborted_one_is_cancelled_and_unknown():
    with harness(device_tokens=1000) as h:
        guess = h.guess(*prompt("a"))
        prefill(h, guess)
        h.decode(guess, 1)
        h.finish(guess, aborted=True)
        assert h.tree.speculations.promote(guess.rid) == "unknown"
        assert h.tree.speculations.counters.cancelled == 1
        assert h.tree.counters.requests == 0


def test_one_that_sglang_gives_up_after_a_retraction_is_over():
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    with harness(device_tokens=1000) as h:
        guess = h.guess(*prompt("a"))
        prefill(h, guess)
        guess.to_finish = FINISH_ABORT("out of memory")
        h.drop(guess)
        assert not h.tree.speculations.in_flight
        assert h.tree.speculations.counters.cancelled == 1


def test_a_trace_has_promoted_speculations_only(tmp_path):
    path = tmp_path / "trace.jsonl"
    with harness(device_tokens=1000, policy_config={"trace": str(path)}) as h:
        guesses = [h.guess(*prompt(name)) for name in "abc"]
        for guess in guesses:
            run(h, guess)
        h.tree.speculations.promote(guesses[1].rid)
        early = h.guess(*prompt("d"))
        h.tree.speculations.promote(early.rid)
        run(h, early)
    traced = [(request.documents[0].id, request.output_tokens) for request in read_trace(path)]
    assert traced == [("b", 1), ("d", 1)]


def test_a_request_whose_grammar_is_being_compiled_is_promoted_and_never_refused():
    with harness(device_tokens=1000) as h:
        early = h.request(*prompt("a"), speculative=True)
        assert h.tree.speculations.promote(early.rid, early) == "running"
        assert h.tree.speculations.is_known(early)
        run(h, early)
        assert retrievals(h, "a") == 1


def test_one_that_was_aborted_while_its_grammar_was_compiled_counts_nothing():
    with harness(device_tokens=1000) as h:
        early = h.request(*prompt("a"), speculative=True)
        # As SGLang does it: one token is left, which runs so that the client is answered.
        early.origin_input_ids = early.origin_input_ids[:1]
        early.to_finish = FINISH_ABORT("Aborted by AbortReq.")
        assert h.tree.speculations.promote(early.rid, early) == "unknown"
        assert not h.tree.speculations.in_flight
        run(h, early)
        assert h.tree.speculations.promote(early.rid) == "unknown"
        assert h.tree.speculations.counters == SpeculationCounters()
        assert h.tree.counters.requests == retrievals(h, "a") == 0
