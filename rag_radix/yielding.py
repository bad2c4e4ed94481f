"""Speculative requests step aside: what SGLang's scheduler lets in, and what it ends.

A speculation comes into the waiting queue only while fewer than `max_prefill_bs` requests wait.
It is ended once it is in the way of a request that is none: when that one waits for a chunked
prefill to go on, for a row or for tokens that speculations hold, or for a place in a queue of
limited length. What it has computed stays in the tree.

These are hooks on the scheduler's methods, so all of it is decided from what all tensor-parallel
ranks share.
"""

from __future__ import annotations

from http import HTTPStatus
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rag_radix.retrieval import Retrieval
from rag_radix.speculation import Speculation, Speculations

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree

REFUSED = "speculation refused"
ENDED = "speculation ended"

_UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
_ENDED_MESSAGE = f"{ENDED}: requests that are no speculations wait"


def abort_on_queued_limit(original: Any, scheduler: Any, req: Any) -> bool:
    """Around `Scheduler._abort_on_queued_limit`: True when `req` may not come in."""
    speculations: Speculations = scheduler.tree_cache.speculations
    if req.to_finish is not None:
        if speculations.is_guess(req):
            # Told to end before it could, since it was retracted or its grammar was being compiled,
            # or the grammar is wrong: to be answered it would wait here for all others.
            status = req.to_finish.status_code or _UNAVAILABLE
            _send_abort(scheduler, req, req.to_finish.message, status)
            return True
        # A request with an error only comes in to be answered with it.
        return bool(original(scheduler, req))
    if not speculations.is_guess(req):
        _make_place(scheduler, speculations)
        return bool(original(scheduler, req))
    if speculations.is_known(req):  # back after a retraction
        if not _is_full(scheduler):
            return bool(original(scheduler, req))
        # With priorities SGLang might have another request go for it.
        _note_ended(speculations.in_flight[req.rid], speculations)
        _send_abort(scheduler, req, _ENDED_MESSAGE)
        return True
    waiting, limit = len(scheduler.waiting_queue), waiting_limit(scheduler)
    if waiting >= limit:
        speculations.counters.refused += 1
        _send_abort(scheduler, req, f"{REFUSED}: {waiting} requests wait, the limit is {limit}")
        return True
    if original(scheduler, req):
        return True
    speculations.start(req)
    return False


def waiting_limit(scheduler: Any) -> int:
    """While so many requests wait, speculations are refused."""
    limit: int = scheduler.tree_cache.settings.max_prefill_bs
    queued = scheduler.max_queued_requests
    return limit if queued is None else min(limit, queued)


def _is_full(scheduler: Any) -> bool:
    """Whether SGLang's queue is at its limit."""
    limit = scheduler.max_queued_requests
    return limit is not None and len(scheduler.waiting_queue) >= limit


def _make_place(scheduler: Any, speculations: Speculations) -> None:
    """With SGLang's queue at its limit, end the youngest guess in it."""
    if not _is_full(scheduler):
        return
    queue = scheduler.waiting_queue
    for speculation in reversed(speculations.in_flight.values()):
        if speculation.retrieval.speculative and speculation.req in queue:
            queue.remove(speculation.req)
            _note_ended(speculation, speculations)
            scheduler._release_aborted_request(speculation.req)
            scheduler.beam_coordinator.retire_group(speculation.req)
            _send_abort(scheduler, speculation.req, _ENDED_MESSAGE)
            return


def before_pending_chunked_abort(scheduler: Any) -> None:
    """Before `Scheduler.process_pending_chunked_abort`, the first step of a pass: end a guess
    in the middle of its prefill, and keep the chunk that it has just computed."""
    req, speculations = scheduler.chunked_req, scheduler.tree_cache.speculations
    if req is None or not speculations.is_guess(req):
        return
    if scheduler._pending_chunked_abort_req is None:
        speculation = speculations.in_flight.get(req.rid)
        if speculation is not None and _is_waited_for(scheduler, speculation):
            _end(scheduler, speculation, speculations)
    if scheduler._pending_chunked_abort_req is req and req.extend_end > req.prefix_len:
        scheduler.stash_chunked_request(req)


def _is_waited_for(scheduler: Any, speculation: Speculation) -> bool:
    """Whether a request waits that isn't better off when `speculation` goes on."""
    tree: KnowledgeTree = scheduler.tree_cache
    return any(
        not tree.speculations.is_guess(req) and not _computes_for(speculation, req, tree)
        for req in scheduler.waiting_queue
    )


def _computes_for(speculation: Speculation, req: Any, tree: KnowledgeTree) -> bool:
    """Whether `speculation` is computing documents that `req` begins with."""
    computing = speculation.retrieval
    keys = zip(tree.path_keys(speculation.req), tree.path_keys(req), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], keys))
    return shared > 0 and computing.kept_documents[shared - 1].end > computing.inserted_end


def after_new_batch_prefill(plan: Any, scheduler: Any) -> None:
    """After `Scheduler.get_new_batch_prefill`: end the guesses that hold what requests which
    still wait would need; as many as these are for rows, all of them for tokens."""
    speculations: Speculations = scheduler.tree_cache.speculations
    if not speculations.in_flight:
        return
    batch = plan.batch_to_run
    if batch is not None:
        decoding = set(batch.decoding_reqs or ())
        speculations.prefilling(req for req in batch.reqs if req not in decoding)
    running = plan.running_batch
    if running.batch_is_full or (batch is None and _waits_for_running_ones(scheduler)):
        waiting = sum(not speculations.is_guess(req) for req in scheduler.waiting_queue)
        size = len(running.reqs) + (0 if batch is None else len(batch.reqs))
        rows = scheduler.get_num_allocatable_reqs(size, running_batch=running)
        guesses = speculations.guesses_running() if waiting else []
        # Youngest first; those that are about to leave already count.
        for guess in guesses if rows > 0 else guesses[:waiting]:
            if not guess.ended:
                _end(scheduler, guess, speculations)


def retraction_order(original: Any, reqs: list[Any]) -> list[int]:
    """Around `ScheduleBatch._get_decode_retraction_order`, of which the last ones are retracted
    first when decoding runs out of tokens: guesses."""
    return sorted(original(reqs), key=lambda index: _is_guess(reqs[index]))


def _is_guess(req: Any) -> bool:
    """Whether `req`, of any scheduler, runs as a guess."""
    retrieval: Retrieval | None = getattr(req, "rag_retrieval", None)
    return retrieval is not None and retrieval.speculative


def _waits_for_running_ones(scheduler: Any) -> bool:
    """Whether requests may wait although there is room: for an adapter to be unloaded, or for
    `--min-free-slots-delay` rows to be free at once."""
    return bool(scheduler.enable_lora or scheduler.min_free_slots_delayer is not None)


def _end(scheduler: Any, speculation: Speculation, speculations: Speculations) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req = speculation.req
    if req.finished() or req.to_finish is not None:
        return
    reason = FINISH_ABORT(_ENDED_MESSAGE, _UNAVAILABLE)
    if req is not scheduler.chunked_req:
        req.to_finish = reason
    elif scheduler._pending_chunked_abort_req is None:
        req.discard_output_reason = reason
        scheduler._pending_chunked_abort_req = req
    else:
        return
    _note_ended(speculation, speculations)


def _note_ended(speculation: Speculation, speculations: Speculations) -> None:
    speculation.ended = True
    speculations.counters.ended += 1


def _send_abort(scheduler: Any, req: Any, message: str, status: HTTPStatus = _UNAVAILABLE) -> None:
    from sglang.srt.managers.scheduler import _make_abort_req

    reason = {"type": "abort", "status_code": status, "message": message}
    scheduler.send_abort_output(_make_abort_req(req, finished_reason=reason), req)
    req.time_stats.trace_ctx.abort(abort_info={"reason": message})
