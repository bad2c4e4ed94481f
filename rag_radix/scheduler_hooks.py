"""What we add to SGLang's scheduler: all hooks on it, and what it answers to calls.

Every hook does nothing for another cache than ours. What a hook does beyond a line is elsewhere:
`schedule_policy` orders the waiting queue, `yielding` lets speculations step aside, `rpc` carries
the calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any

from rag_radix import document_order, yielding
from rag_radix.control import actions, metrics
from rag_radix.control.selector import Selector
from rag_radix.door import is_applied
from rag_radix.errors import IncompatibleSGLangError
from rag_radix.names import ORDER_ACTION, POOL_ACTION, PROMOTE_ACTION, STATE_KEY
from rag_radix.sglang_compat import surface_problems

_MODULE = "sglang.srt.managers.scheduler"


def install() -> None:
    """Register the hooks where there is a scheduler."""
    if _MODULE in sys.modules:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for target, (kind, hook) in TARGETS.items():
            HookRegistry.register(target, hook, HookType(kind))


def verify() -> None:
    """Raise IncompatibleSGLangError unless this process's scheduler has the hooks, and all
    that they call."""
    for target, (_, hook) in TARGETS.items():
        if not is_applied(target, hook):
            raise IncompatibleSGLangError(
                f"the hook on {target} isn't in place: the log says why, and without it the "
                "scheduler would know nothing of documents and speculations"
            )
    if problems := surface_problems(SURFACE):
        raise IncompatibleSGLangError("SGLang's scheduler has changed: " + "; ".join(problems))


def has_tree(scheduler: Any) -> bool:
    """Whether `scheduler` has a knowledge tree."""
    return hasattr(scheduler.tree_cache, "speculations")


def _after_init(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    if not has_tree(scheduler):
        return
    missing = [name for name in ATTRIBUTES if not hasattr(scheduler, name)]
    if missing:
        raise IncompatibleSGLangError(f"SGLang's scheduler has no {', '.join(missing)}")
    # SGLang makes a new list whenever requests leave the queue.
    scheduler.tree_cache.control.longest_request_tokens = scheduler.max_req_len
    scheduler.tree_cache.waiting = lambda: scheduler.waiting_queue
    scheduler.tree_cache.storing.is_idle = lambda: scheduler.is_fully_idle(for_health_check=True)
    metrics.install(scheduler)


def _after_schedule_policy(_result: Any, scheduler: Any) -> None:
    if has_tree(scheduler):
        from rag_radix import schedule_policy

        schedule_policy.install(scheduler)


def _after_dispatcher(_result: Any, scheduler: Any) -> None:
    if has_tree(scheduler):
        from rag_radix import rpc

        rpc.serve(scheduler, ACTIONS)


def _after_internal_state(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    if has_tree(scheduler):
        report = scheduler.tree_cache.report()
        report["queue"] = scheduler.policy.report()
        result.internal_state[STATE_KEY] = report


def _around_queued_limit(original: Any, scheduler: Any, recv_req: Any) -> bool:
    if has_tree(scheduler):
        scheduler.tree_cache.control.arrived(recv_req)
        with _timed(scheduler):
            return yielding.abort_on_queued_limit(original, scheduler, recv_req)
    return bool(original(scheduler, recv_req))


def _after_release_aborted(_result: Any, scheduler: Any, req: Any) -> None:
    if has_tree(scheduler):
        scheduler.tree_cache.speculations.aborted(req)


def _before_chunked_abort(scheduler: Any) -> None:
    if has_tree(scheduler):
        with _timed(scheduler):
            yielding.before_pending_chunked_abort(scheduler)


def _after_batch(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    if has_tree(scheduler):
        with _timed(scheduler):
            yielding.after_new_batch_prefill(result, scheduler)
        scheduler.tree_cache.control.pass_begins()
        if result.batch_to_run is not None:
            scheduler.tree_cache.control.started(result.batch_to_run.reqs)


def _around_sleep(original: Any, scheduler: Any) -> None:
    preloading = scheduler.tree_cache.storing.preloading if has_tree(scheduler) else None
    # It goes on from pass to pass, and would take a second for each.
    if preloading is None or not preloading.is_running:
        original(scheduler)


def _after_new_weights(_result: Any, updater: Any, *_args: Any, **_kwargs: Any) -> None:
    # SGLang flushes its cache unless told not to, or while requests run.
    if has_tree(updater.scheduler):
        updater.scheduler.tree_cache.control.invalidate(Selector(prefix=""))
        updater.scheduler.tree_cache.storing.weights_changed()


def _promote(scheduler: Any, rids: list[str]) -> dict[str, str]:
    speculations = scheduler.tree_cache.speculations
    with _timed(scheduler):
        # A request whose grammar isn't compiled yet is not in the waiting queue.
        early = {req.rid: req for req in scheduler.grammar_manager.grammar_queue}
        return {rid: speculations.promote(rid, early.get(rid)) for rid in rids}


def _pool(scheduler: Any, _body: None) -> dict[str, Any]:
    with _timed(scheduler):
        waiting, limit = len(scheduler.waiting_queue), yielding.waiting_limit(scheduler)
        return {"waiting": waiting, "max_prefill_bs": limit, "accepts": waiting < limit}


@contextmanager
def _timed(scheduler: Any) -> Iterator[None]:
    """Count what speculations cost the scheduler."""
    started_s = thread_time()
    try:
        yield
    finally:
        scheduler.tree_cache.speculations.counters.scheduler_s += thread_time() - started_s


def _order(scheduler: Any, question: dict[str, Any]) -> dict[str, Any]:
    return document_order.answer(scheduler.tree_cache, question)


ACTIONS: dict[str, Callable[[Any, Any], Any]] = {
    PROMOTE_ACTION: _promote,
    POOL_ACTION: _pool,
    ORDER_ACTION: _order,
    **actions.ACTIONS,
}

_HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "__init__": ("after", _after_init),
    "init_request_dispatcher": ("after", _after_dispatcher),
    "init_schedule_policy": ("after", _after_schedule_policy),
    "get_internal_state": ("after", _after_internal_state),
    "_abort_on_queued_limit": ("around", _around_queued_limit),
    "_release_aborted_request": ("after", _after_release_aborted),
    "process_pending_chunked_abort": ("before", _before_chunked_abort),
    "get_new_batch_prefill": ("after", _after_batch),
    "maybe_sleep_on_idle": ("around", _around_sleep),
}
_BATCH = "sglang.srt.managers.schedule_batch"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater"
_UPDATER = f"{_WEIGHTS}.SchedulerWeightUpdaterManager"
TARGETS: dict[str, tuple[str, Callable[..., Any]]] = {
    **{f"{_MODULE}.Scheduler.{name}": hook for name, hook in _HOOKS.items()},
    f"{_BATCH}.ScheduleBatch._get_decode_retraction_order": ("around", yielding.retraction_order),
    f"{_UPDATER}.flush_cache_after_weight_update": ("after", _after_new_weights),
}

# What the hooks take and call, with its parameters.
SURFACE: dict[str, tuple[str, ...]] = {
    f"{_MODULE}:_make_abort_req": ("req", "finished_reason"),
    f"{_BATCH}:ScheduleBatch._get_decode_retraction_order": ("reqs",),
    f"{_WEIGHTS}:SchedulerWeightUpdaterManager.flush_cache_after_weight_update": (
        "self",
        "recv_req",
        "success",
        "message",
    ),
    **{
        f"{_MODULE}:Scheduler.{name}": ("self", *parameters)
        for name, parameters in {
            "__init__": ("server_args", "port_args"),
            "init_request_dispatcher": (),
            "init_schedule_policy": (),
            "get_internal_state": ("recv_req",),
            "_abort_on_queued_limit": ("recv_req",),
            "_release_aborted_request": ("req",),
            "process_pending_chunked_abort": (),
            "get_new_batch_prefill": ("running_batch",),
            "maybe_sleep_on_idle": (),
            "is_fully_idle": ("for_health_check", "ignore_waiting"),
            "send_abort_output": ("abort_req", "req"),
            "stash_chunked_request": ("req",),
            "get_num_allocatable_reqs": (
                "running_bs",
                "beam_width",
                "running_batch",
                "num_held_rows",
            ),
        }.items()
    },
}

# What they read and set on the scheduler.
ATTRIBUTES = (
    "_pending_chunked_abort_req",
    "_request_dispatcher",
    "beam_coordinator",
    "chunked_req",
    "enable_lora",
    "grammar_manager",
    "max_queued_requests",
    "max_req_len",
    "metrics_reporter",
    "min_free_slots_delayer",
    "tree_cache",
    "waiting_queue",
)
