"""A request made ahead of the program, which becomes its answer or is forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from rag_radix_frontend.errors import RequestAborted, SpeculationEnded, SpeculationRefused
from rag_radix_frontend.gate import Gate
from rag_radix_frontend.in_flight import InFlight
from rag_radix_frontend.promotion import Promoter
from rag_radix_frontend.retrieval_report import RetrievalLog, RetrievalReport
from rag_radix_frontend.run_ahead import Call
from rag_radix_frontend.workers import WORKERS

Fate = Literal["refused", "ended", "failed", "cancelled", "kept"]


class Speculation:
    """A call that runs on a thread of its own, and what has come of it so far.

    Its events are handed out only once it is certain that it is the answer: when the server has
    made it an ordinary request, or when it is complete. Until then the server may end it.
    """

    def __init__(
        self,
        call: Call,
        identity: object,
        *,
        in_flight: InFlight,
        promoter: Promoter,
        gate: Gate,
        log: RetrievalLog,
        over: Callable[[Speculation], None],
    ) -> None:
        """Starts the call, which the gate has let through.

        `identity` is equal for calls that ask the same of the server. `over` is called, on the
        call's thread, when it has ended in any way.
        """
        self.identity = identity
        self.started_s = time.perf_counter()
        self._call = call
        self._in_flight = in_flight
        self._promoter = promoter
        self._gate = gate
        self._log = log
        self._over = over
        # Its lock is reentrant: garbage collection may end a program at any point.
        self._changed = threading.Condition()
        self._events: list[Any] = []
        self._is_over = False
        self._error: Exception | None = None
        self._promoted: bool | None = None
        self._fate: Fate | None = None
        self._overlapped_s = 0.0
        self._left = False
        WORKERS.start(self._run)

    @property
    def turned_away(self) -> bool:
        """The server had no room for it, so it may be tried again."""
        return isinstance(self._error, SpeculationRefused | SpeculationEnded)

    def promote(self, search_ended_s: float) -> None:
        """It should become the answer; the server is told in the background."""
        self._overlapped_s = search_ended_s - self.started_s
        self._leave()
        if self._error is not None:
            return
        rids = self._in_flight.make_ordinary(self._call.state)
        if rids:
            self._promoter.ask(rids, is_over=lambda: self._is_over, reply=self._reply)
        else:  # Nothing is sent yet, and what will be is an ordinary request.
            self._reply(True)

    def discard(self) -> None:
        """It isn't the answer: end it in the background."""
        with self._changed:
            self._decide("cancelled")
        self._in_flight.discard(self._call.state)

    def is_answer(self) -> bool:
        """Whether a promoted speculation is what the program gets; waits until that is certain."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._promoted is not None)
            kept = self._error is None if self._is_over else self._promoted is True
            if kept:
                self._decide("kept")
            return kept

    def result(self) -> Any:
        """What the call returned; raises what it raised."""
        (result,) = self.events()
        return result

    def events(self) -> Iterator[Any]:
        """What the call yields: first all there is, then the rest as it comes."""
        handed_out = 0
        try:
            while fresh := self._events_from(handed_out):
                yield from fresh
                handed_out += len(fresh)
        finally:
            if not self._is_over:
                self._in_flight.discard(self._call.state)
        if self._error is not None:
            raise self._error

    def _events_from(self, start: int) -> list[Any]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > start or self._is_over)
            return self._events[start:]

    def _reply(self, promoted: bool) -> None:
        with self._changed:
            self._promoted = promoted
            self._changed.notify_all()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            result = self._call()
            for event in result if self._call.method == "generate_stream" else [result]:
                with self._changed:
                    self._events.append(event)
                    self._changed.notify_all()
        except Exception as raised:
            error = raised
        fate = self._fate_by(error) if error is not None else None
        with self._changed:
            self._error, self._is_over = error, True
            if self._fate == "cancelled":
                self._count_waste()
            elif fate is not None:
                self._decide(fate)
            self._changed.notify_all()
        self._leave()
        self._over(self)

    def _decide(self, fate: Fate) -> None:
        if self._fate is not None:
            return
        self._fate = fate
        if fate == "kept":
            self._log.add(RetrievalReport(kept=1, search_not_overlapped_s=-self._overlapped_s))
            return
        self._log.add(RetrievalReport(**{fate: 1}))
        if self._is_over:
            self._count_waste()

    def _fate_by(self, error: Exception) -> Fate:
        match error:
            case SpeculationRefused():
                return "refused"
            case SpeculationEnded():
                return "ended"
        # The server aborts requests for others, too, and when they take too long.
        return "cancelled" if self._in_flight.is_cancelled(self._call.state) else "failed"

    def _count_waste(self) -> None:
        if wasted_tokens := computed_tokens(self._meta_info()):
            self._log.add(RetrievalReport(wasted_tokens=wasted_tokens))

    def _meta_info(self) -> Any:
        if isinstance(self._error, RequestAborted):
            return self._error.meta_info
        return self._events[-1][1] if self._call.method != "select" and self._events else None

    def _leave(self) -> None:
        with self._changed:
            left, self._left = self._left, True
        if not left:
            self._gate.leave()


def computed_tokens(meta_info: Any) -> int:
    """Tokens the server computed for a request; 0 where it doesn't say."""
    if not isinstance(meta_info, Mapping) or not meta_info.get("completion_tokens"):
        return 0
    uncached = meta_info.get("prompt_tokens", 0) - meta_info.get("cached_tokens", 0)
    return int(uncached + meta_info["completion_tokens"])
