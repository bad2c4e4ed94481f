"""Which guesses are ended for requests that wait: real requests, in states set by hand.

That SGLang's scheduler comes into these states, and what it does then, is shown on servers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tree_harness import harness
from unit.tree.prompts import document, prompt

from rag_radix import yielding


@pytest.fixture
def h():
    with harness(device_tokens=4000) as built:
        yield built


def scheduler(h, *waiting: Any, free_rows: int = 1, **fields: Any) -> Any:
    state = {
        "tree_cache": h.tree,
        "waiting_queue": list(waiting),
        "chunked_req": None,
        "_pending_chunked_abort_req": None,
        "enable_lora": False,
        "min_free_slots_delayer": None,
        "get_num_allocatable_reqs": lambda size, running_batch: free_rows,
        "stash_chunked_request": h.publish,
    }
    return SimpleNamespace(**state | fields)


def decoding(h, count: int) -> list[Any]:
    """Guesses that decode, oldest first."""
    guesses = [h.guess(*prompt("a", question=question)) for question in range(count)]
    for guess in guesses:
        h.admit(guess)
        h.compute(guess)
        h.publish(guess)
        h.decode(guess, 1)
    return guesses


def a_pass(on: Any, *, full: bool, batch: Any = None) -> None:
    running = SimpleNamespace(batch_is_full=full, reqs=[])
    plan = SimpleNamespace(batch_to_run=batch, running_batch=running)
    yielding.after_new_batch_prefill(plan, on)


def ended(guesses: list[Any]) -> list[bool]:
    return [guess.to_finish is not None for guess in guesses]


def test_for_rows_as_many_are_ended_as_requests_wait_youngest_first(h):
    guesses = decoding(h, 4)
    on = scheduler(h, h.request(*prompt("x")), h.request(*prompt("y")), free_rows=0)
    for _ in range(2):  # those that are leaving count
        a_pass(on, full=True)
        assert ended(guesses) == [False, False, True, True]
    assert guesses[3].to_finish.message.startswith("speculation ended")
    assert h.tree.speculations.counters.ended == 2


def test_for_tokens_all_are_ended(h):
    guesses = decoding(h, 3)
    a_pass(scheduler(h, h.request(*prompt("x"))), full=True)
    assert ended(guesses) == [True] * 3


def test_none_is_ended_while_there_is_room_or_only_guesses_wait(h):
    guesses = decoding(h, 2)
    a_pass(scheduler(h, h.request(*prompt("x"))), full=False)
    a_pass(scheduler(h, h.guess(*prompt("x"))), full=True)
    a_pass(scheduler(h), full=True)
    assert ended(guesses) == [False, False]


def test_a_promoted_one_is_an_ordinary_request(h):
    guesses = decoding(h, 2)
    assert h.tree.speculations.promote(guesses[1].rid) == "running"
    a_pass(scheduler(h, h.request(*prompt("x"))), full=True)
    assert ended(guesses) == [True, False]
    assert h.tree.speculations.promote(guesses[0].rid) == "unknown"


@pytest.mark.parametrize("field", [{"enable_lora": True}, {"min_free_slots_delayer": object()}])
def test_a_pass_that_serves_nobody_though_there_is_room_ends_guesses(h, field):
    guesses = decoding(h, 1)
    waiting = h.request(*prompt("x"))
    a_pass(
        scheduler(h, waiting, **field),
        full=False,
        batch=SimpleNamespace(reqs=[], decoding_reqs=None),
    )
    assert ended(guesses) == [False]
    a_pass(scheduler(h, waiting, **field), full=False)
    assert ended(guesses) == [True]


def test_when_decoding_runs_out_of_tokens_guesses_are_retracted_first(h):
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    guesses = decoding(h, 3)
    h.tree.speculations.promote(guesses[2].rid)
    ordinary = h.request(*prompt("x"))  # would go first: nothing of its output is there
    reqs = [guesses[0], ordinary, *guesses[1:]]
    order = yielding.retraction_order(ScheduleBatch._get_decode_retraction_order, reqs)
    assert order == [3, 1, 0, 2]


def test_decoding_requests_of_a_mixed_batch_are_not_counted_as_prefilled(h):
    first, second = decoding(h, 2)
    tokens = [h.tree.speculations.in_flight[g.rid].computed_tokens for g in (first, second)]
    first.prefix_len, first.extend_end = 10, 40
    batch = SimpleNamespace(reqs=[first, second], decoding_reqs=[second])
    a_pass(scheduler(h), full=False, batch=batch)
    after = [h.tree.speculations.in_flight[g.rid].computed_tokens for g in (first, second)]
    assert [now - then for now, then in zip(after, tokens, strict=True)] == [30, 0]


def chunked(h) -> Any:
    """A guess whose first document and a half are computed, the half not yet published."""
    guess = h.guess(*prompt("a", "b"))
    h.admit(guess)
    h.compute(guess, 60)
    h.publish(guess)
    h.compute(guess, 20)
    return guess


def test_a_prefill_is_ended_between_chunks_and_keeps_the_last_one(h):
    guess = chunked(h)
    on = scheduler(h, h.request(*prompt("x")), chunked_req=guess)
    yielding.before_pending_chunked_abort(on)
    assert on._pending_chunked_abort_req is guess
    assert guess.discard_output_reason.message.startswith("speculation ended")
    assert guess.rag_retrieval.inserted_end == 80
    yielding.before_pending_chunked_abort(on)
    assert h.tree.speculations.counters.ended == 1


@pytest.mark.parametrize(
    ("waiting", "ends"),
    [
        (("a", "b"), False),  # "b" is being computed
        (("a", "b", "c"), False),
        (("a", "c"), True),  # "a" is there already
        (("b", "a"), True),
    ],
)
def test_a_prefill_goes_on_for_requests_that_wait_for_its_documents(h, waiting, ends):
    guess = chunked(h)
    on = scheduler(h, h.request(*prompt(*waiting, question=3)), chunked_req=guess)
    yielding.before_pending_chunked_abort(on)
    assert (on._pending_chunked_abort_req is guess) == ends
    assert guess.rag_retrieval.inserted_end == (80 if ends else 60)


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_prefill_goes_on_for_a_tenant_that_will_find_its_documents(h, is_chained, monkeypatch):
    monkeypatch.setattr(h.tree.tree_core.kv_events, "enabled", is_chained)
    guess = h.guess(*prompt("a", "b"), cache_salt="x", salt_from=1)
    h.admit(guess)
    h.compute(guess, 30)  # up to the middle of "a", which is public
    waiting = h.request(*prompt("a", "c"), cache_salt="y", salt_from=1)
    on = scheduler(h, waiting, chunked_req=guess)
    yielding.before_pending_chunked_abort(on)
    assert (on._pending_chunked_abort_req is guess) == is_chained


def test_a_prefill_goes_on_for_unannotated_requests_never(h):
    guess = chunked(h)
    on = scheduler(h, h.request(document("x")), chunked_req=guess)
    yielding.before_pending_chunked_abort(on)
    assert on._pending_chunked_abort_req is guess


def test_a_cancelled_prefill_keeps_its_last_chunk_too(h):
    guess = chunked(h)
    on = scheduler(h, chunked_req=guess, _pending_chunked_abort_req=guess)
    yielding.before_pending_chunked_abort(on)
    assert guess.rag_retrieval.inserted_end == 80
    assert h.tree.speculations.counters.ended == 0


def test_the_chunks_of_others_are_left_alone(h):
    other = h.request(*prompt("a", "b"))
    h.admit(other)
    h.compute(other, 60)
    on = scheduler(h, h.request(*prompt("x")), chunked_req=other, _pending_chunked_abort_req=other)
    yielding.before_pending_chunked_abort(on)
    assert other.rag_retrieval.inserted_end == 0
    on.chunked_req = None
    yielding.before_pending_chunked_abort(on)


def arriving(on: Any, req: Any) -> tuple[bool, list[str]]:
    """Whether `req` is turned away, and what SGLang and we said to whom."""
    said: list[str] = []

    def sglang(_scheduler: Any, _req: Any) -> bool:
        said.append("sglang was asked")
        return False

    on.send_abort_output = lambda abort, _req: said.append(abort.finished_reason["message"])
    return yielding.abort_on_queued_limit(sglang, on, req), said


def test_a_guess_is_refused_by_a_full_queue_before_sglang_makes_place_for_its_priority(h):
    ordinary = h.request(*prompt("x"))
    on = scheduler(h, ordinary, max_queued_requests=1)
    turned_away, said = arriving(on, h.request(*prompt("a"), speculative=True))
    assert turned_away
    assert said == ["speculation refused: 1 requests wait, the limit is 1"]
    assert on.waiting_queue == [ordinary]


def test_a_retracted_guess_is_ended_by_a_full_queue(h):
    (guess,) = decoding(h, 1)
    h.drop(guess)
    guess.reset_for_retract()
    turned_away, said = arriving(scheduler(h, max_queued_requests=1), guess)
    assert (turned_away, said) == (False, ["sglang was asked"])
    on = scheduler(h, h.request(*prompt("x")), max_queued_requests=1)
    turned_away, said = arriving(on, guess)
    assert turned_away
    assert said == ["speculation ended: requests that are no speculations wait"]
    h.tree.speculations.aborted(guess)  # as SGLang does with what is turned away
    counters = h.tree.speculations.counters
    assert (counters.ended, counters.cancelled) == (1, 0)
    assert not h.tree.speculations.in_flight


def test_a_guess_that_is_retracted_while_it_ends_is_over_at_once(h):
    (guess,) = decoding(h, 1)
    waiting = h.request(*prompt("x"))
    a_pass(scheduler(h, waiting), full=True)
    h.drop(guess)
    guess.reset_for_retract()
    turned_away, said = arriving(scheduler(h, waiting, max_queued_requests=None), guess)
    assert turned_away
    assert said == ["speculation ended: requests that are no speculations wait"]
    assert h.tree.speculations.counters.ended == 1
    assert not h.tree.speculations.in_flight


def test_a_guess_that_is_over_before_it_comes_in_is_answered_at_once(h):
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    guess = h.request(*prompt("a"), speculative=True)
    guess.to_finish = FINISH_ABORT("Aborted by AbortReq.")  # while its grammar was compiled
    on = scheduler(h, h.request(*prompt("x")), max_queued_requests=None)
    assert arriving(on, guess) == (True, ["Aborted by AbortReq."])
    assert not h.tree.speculations.in_flight
