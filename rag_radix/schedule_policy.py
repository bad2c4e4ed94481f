"""SGLang's scheduling policy and prefill batch, where they ask our waiting queue."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy

from rag_radix.errors import IncompatibleSGLangError
from rag_radix.knowledge_tree import KnowledgeTree
from rag_radix.reordering import load_share
from rag_radix.sglang_compat import device_bytes_per_token, surface_problems
from rag_radix.waiting_queue import Turn, WaitingQueue

logger = logging.getLogger(__name__)

_STOCK_DEFAULT = "fcfs"
# Host to device over PCIe 4.0 x16.
_LOAD_BYTES_PER_S = 25e9


class KnowledgeSchedulePolicy(SchedulePolicy):
    """SGLang's policy with our order of the queue, unless `--schedule-policy` asks for another
    or `reorder_window` is 0. Speculations are last in any case.

    Args:
        scheduler: SGLang's, with a knowledge tree and a policy of its own.

    Attributes:
        queue: Ours, if it is in charge.
        only_guesses_wait: In this pass, so that they may be served.
    """

    tree_cache: KnowledgeTree

    def __init__(self, scheduler: Any) -> None:
        stock = scheduler.policy
        super().__init__(
            scheduler.schedule_policy,
            stock.tree_cache,
            stock.enable_hierarchical_cache,
            stock.enable_priority_scheduling,
            stock.schedule_low_priority_values_first,
        )
        self._scheduler = scheduler
        self.only_guesses_wait = False
        self.queue: WaitingQueue | None = None
        tree = self.tree_cache
        if scheduler.schedule_policy == _STOCK_DEFAULT and tree.settings.reorder_window:
            load_s = device_bytes_per_token(tree) / _LOAD_BYTES_PER_S
            self.queue = WaitingQueue(
                tree,
                tree.settings.reorder_window,
                load_share(tree.settings.prefill_cost, load_s),
                self.priority_sign if self.enable_priority_scheduling else 0,
            )

    def calc_priority(
        self, waiting_queue: list[Any], running_batch: Any = None, processed_tokens: int = 0
    ) -> None:
        """Order the queue, in place, as a pass begins."""
        if self.queue is not None:
            waiting_queue[:] = self.queue.arrange(waiting_queue, self._in_flight())
        else:
            super().calc_priority(waiting_queue, running_batch, processed_tokens)
            waiting_queue.sort(key=self._is_guess)
        self.only_guesses_wait = bool(waiting_queue) and self._is_guess(waiting_queue[0])

    def waiting_queue_prefix_matched(self, waiting_queue: list[Any]) -> bool:
        """Whether the requests know how much of them is cached."""
        if self.queue is not None:
            return True
        return bool(super().waiting_queue_prefix_matched(waiting_queue))

    def report(self) -> dict[str, Any]:
        """What is in charge and what it has done, as plain JSON values."""
        if self.queue is None:
            return {"order": self.policy.value}
        return {"order": "reuse", **self.queue.report()}

    def turn(self, req: Any, batch: list[Any]) -> Turn:
        """Whether `req`, just matched, may be added to `batch`."""
        if self._is_guess(req) and not (
            self.only_guesses_wait and all(map(self._is_guess, [*batch, *self._chunked()]))
        ):
            return Turn.STOP
        if self.queue is None:
            return Turn.SERVE
        return self.queue.turn(req, req.prefix_len + req.host_hit_length)

    def may_preempt(self, req: Any) -> bool:
        """Whether running requests of a lower priority may make way for `req`: SGLang asks before
        it knows whether this one would be added."""
        return not self._is_guess(req) and (self.queue is None or self.queue.may_go_now(req))

    def serve(self, req: Any) -> None:
        """Note that `req` was added to the batch."""
        if self.queue is not None:
            self.queue.serve(req)

    def _is_guess(self, req: Any) -> bool:
        return self.tree_cache.speculations.is_guess(req)

    def _chunked(self) -> list[Any]:
        req = self._scheduler.chunked_req
        return [] if req is None else [req]

    def _in_flight(self) -> Iterator[Any]:
        yield from self._chunked()
        # With overlap, the batch that runs as this pass is made.
        for batch, _ in getattr(self._scheduler, "result_queue", ()):
            if batch.forward_mode.is_extend():
                yield from batch.reqs


class KnowledgePrefillAdder(PrefillAdder):
    """SGLang's prefill batch, which passes over requests whose turn it isn't."""

    def __init__(self, policy: KnowledgeSchedulePolicy, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._policy = policy

    def add_one_req(
        self, req: Any, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        """SGLang's, when it is the turn of `req`."""
        turn = self._policy.turn(req, self.can_run_list)
        if turn is not Turn.SERVE:
            return AddReqResult.CONTINUE if turn is Turn.SKIP else AddReqResult.OTHER
        result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        if self.can_run_list and self.can_run_list[-1] is req:
            self._policy.serve(req)
        return result

    def preempt_to_schedule(self, req: Any) -> bool:
        """SGLang's, for requests that may preempt others."""
        return self._policy.may_preempt(req) and bool(super().preempt_to_schedule(req))


def install(scheduler: Any) -> None:
    """Let a scheduler with a knowledge tree serve its queue in our order, and log in which.

    For after `Scheduler.init_schedule_policy`.

    Raises:
        IncompatibleSGLangError: SGLang's scheduling isn't what we extend.
    """
    if problems := surface_problems(SURFACE):
        raise IncompatibleSGLangError("SGLang's scheduling has changed: " + "; ".join(problems))
    policy = scheduler.policy = KnowledgeSchedulePolicy(scheduler)
    scheduler.get_prefill_adder_class = lambda: partial(KnowledgePrefillAdder, policy)
    window = policy.tree_cache.settings.reorder_window
    if policy.queue is not None:
        order = f"most reused by computed first, overtaken {window} times at most"
    elif window == 0:
        order = f"--schedule-policy {scheduler.schedule_policy}, since reorder_window is 0"
    else:
        order = f"--schedule-policy {scheduler.schedule_policy}, as asked for"
    logger.info("Waiting queue: %s; speculations last", order)


# What is overridden or called, with its parameters.
_POLICY = "sglang.srt.managers.schedule_policy"
SURFACE: dict[str, tuple[str, ...]] = {
    f"{_POLICY}:SchedulePolicy.__init__": (
        "self",
        "policy",
        "tree_cache",
        "enable_hierarchical_cache",
        "enable_priority_scheduling",
        "schedule_low_priority_values_first",
    ),
    f"{_POLICY}:SchedulePolicy.calc_priority": (
        "self",
        "waiting_queue",
        "running_batch",
        "processed_tokens",
    ),
    f"{_POLICY}:SchedulePolicy.waiting_queue_prefix_matched": ("self", "waiting_queue"),
    f"{_POLICY}:PrefillAdder.add_one_req": (
        "self",
        "req",
        "has_chunked_req",
        "truncation_align_size",
    ),
    f"{_POLICY}:PrefillAdder.preempt_to_schedule": ("self", "req"),
    "sglang.srt.managers.scheduler:Scheduler.init_schedule_policy": ("self",),
    "sglang.srt.managers.scheduler:Scheduler.get_prefill_adder_class": ("self",),
    "sglang.srt.managers.schedule_batch:Req._compute_max_prefix_len": ("self", "input_len"),
    "sglang.srt.mem_cache.radix_cache:RadixKey.__init__": (
        "self",
        "token_ids",
        "extra_key",
        "is_bigram",
        "limit",
        "cache_salt",
    ),
    "sglang.srt.mem_cache.radix_cache:RadixKey.child_key_at": ("self", "offset", "page_size"),
    "sglang.srt.mem_cache.radix_cache:RadixKey.match_at": (
        "self",
        "other",
        "offset",
        "page_size",
    ),
}
