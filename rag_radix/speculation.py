"""Speculative requests: which are in flight, which have ended, and which of them were right.

A speculation is a request whose annotation says `speculative`: a guess at what its client will
want once its search has ended. Its KV goes into the tree like any other, but it counts as a
retrieval only when the client promotes it. From then on it is an ordinary request.

Every tensor-parallel rank sees the same requests and the same promotions in the same order, so
all of this is the same on each of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rag_radix.counters import SpeculationCounters
from rag_radix.retrieval import Retrieval
from rag_radix.sglang_compat import is_finished_unaborted

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree

Promotion = Literal["running", "finished", "unknown"]

# Of those that have ended with an answer; one takes about 2 KB.
_REMEMBERED = 1024


@dataclass(slots=True, eq=False)
class Speculation:
    """A speculative request that was admitted and isn't over, promoted or not.

    Attributes:
        req: SGLang's request.
        retrieval: Its progress; says whether it is still a guess.
        running: Whether it has left the waiting queue.
        ended: Whether it was told to end.
        computed_tokens: Tokens it has prefilled, again after each retraction.
    """

    req: Any
    retrieval: Retrieval
    running: bool = False
    ended: bool = False
    computed_tokens: int = 0


@dataclass(slots=True)
class _Answered:
    """A speculation that has ended with its answer, without SGLang's request."""

    retrieval: Retrieval
    node_ids: tuple[int, ...]
    output_tokens: int
    computed_tokens: int


class Speculations:
    """The speculative requests of one tree.

    Attributes:
        in_flight: By request id, oldest first.
        counters: What has become of all of them.
    """

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self.in_flight: dict[str, Speculation] = {}
        self.counters = SpeculationCounters()
        self._answered: OrderedDict[str, _Answered] = OrderedDict()

    def retrieval(self, req: Any) -> Retrieval:
        return Retrieval.of(req, self._tree.settings.max_depth)

    def is_guess(self, req: Any) -> bool:
        """Whether `req` is a speculation that wasn't promoted."""
        return self.retrieval(req).speculative

    def is_known(self, req: Any) -> bool:
        """Whether `req` is in flight: it comes back to the queue after a retraction."""
        return self._of(req) is not None

    def start(self, req: Any) -> None:
        """`req`, a speculation, is admitted to the waiting queue."""
        self.counters.started += 1
        self.in_flight[req.rid] = Speculation(req, self.retrieval(req))

    def guesses_running(self) -> list[Speculation]:
        """Those not promoted that hold slots of the device, youngest first."""
        return [
            speculation
            for speculation in reversed(self.in_flight.values())
            if speculation.running and speculation.retrieval.speculative
        ]

    def prefilling(self, reqs: Iterable[Any]) -> None:
        """A pass begins in which `reqs` prefill, each from its prefix to its extend end."""
        if self.in_flight:
            for req in reqs:
                if (speculation := self._of(req)) is not None:
                    speculation.running = True
                    speculation.computed_tokens += req.extend_len

    def promote(self, rid: str, early: Any = None) -> Promotion:
        """Make the speculation `rid` an ordinary request, which counts unless its annotation says
        that it doesn't; idempotent.

        Args:
            rid: Its id.
            early: SGLang's request of that id when it isn't admitted yet, since its grammar
                is being compiled.

        Returns:
            "running" if it waits or runs, "finished" if it has ended with its answer, "unknown"
            if it was refused, ended, cancelled, or is one of the forgotten.
        """
        if early is not None and rid not in self.in_flight and self.is_guess(early):
            if early.to_finish is not None:  # aborted meanwhile
                return "unknown"
            self.start(early)
        speculation = self.in_flight.get(rid)
        if speculation is not None:
            if speculation.req.to_finish is not None or speculation.ended:
                return "unknown"
            if speculation.retrieval.speculative:
                speculation.retrieval.speculative = False
                self.counters.promoted += 1
                self._tree.count_running(speculation.req)
            return "running"
        answered = self._answered.get(rid)
        if answered is None:
            return "unknown"
        if answered.retrieval.speculative:
            answered.retrieval.speculative = False
            self.counters.promoted += 1
            self.counters.wasted_tokens -= answered.computed_tokens
            if answered.retrieval.annotation.counts:
                self._tree.count_ended(
                    answered.retrieval, answered.node_ids, answered.output_tokens
                )
        return "finished"

    def released(self, req: Any) -> None:
        """`req` has given its slots back: it has ended, or was retracted and will come back."""
        speculation = self._of(req)
        if speculation is not None:
            # SGLang gives up some requests that it has retracted: only `to_finish` says so.
            if req.finished() or req.to_finish is not None:
                self._over(speculation)
            else:
                speculation.running = False

    def aborted(self, req: Any) -> None:
        """`req` was aborted while it waited or between two chunks of its prefill."""
        speculation = self._of(req)
        if speculation is not None:
            self._over(speculation)

    def _of(self, req: Any) -> Speculation | None:
        speculation = self.in_flight.get(req.rid)
        return speculation if speculation is not None and speculation.req is req else None

    def _over(self, speculation: Speculation) -> None:
        req, retrieval = speculation.req, speculation.retrieval
        del self.in_flight[req.rid]
        speculation.computed_tokens += len(req.output_ids)
        if retrieval.speculative:
            self.counters.wasted_tokens += speculation.computed_tokens
        if is_finished_unaborted(req):
            self._answered[req.rid] = _Answered(
                retrieval,
                self._tree.path_ids(req),
                len(req.output_ids),
                speculation.computed_tokens,
            )
            if len(self._answered) > _REMEMBERED:
                self._answered.popitem(last=False)
        elif retrieval.speculative and not speculation.ended:
            self.counters.cancelled += 1
