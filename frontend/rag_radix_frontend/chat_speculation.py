"""A chat completion asked for ahead of its documents, which becomes the answer or is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator
from typing import Any

from rag_radix_frontend.chat_connection import computed_tokens_of
from rag_radix_frontend.chat_server import ChatServer
from rag_radix_frontend.retrieval_report import RetrievalLog, RetrievalReport
from rag_radix_frontend.wire import ENDED, REFUSED

_TURNED_AWAY = {REFUSED: "refused", ENDED: "ended"}


class ChatSpeculation:
    """One candidate: it is sent when the server takes it, and again if the server gave it up.

    What it has is handed out only once it is certain that it is the answer, as with
    `rag_radix_frontend.speculation`. Belongs to the event loop.

    Args:
        server: Where it is sent.
        options: Of `chat.completions.create`, for an ordinary request.
        log: What becomes of it is noted here.
        pause_s: It isn't sent before.
    """

    def __init__(
        self, server: ChatServer, options: dict[str, Any], log: RetrievalLog, pause_s: float
    ) -> None:
        self._server = server
        self._options = options
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._admission = asyncio.Event()
        self._news = asyncio.Event()
        self._events: list[Any] = []
        self._error: Exception | None = None
        # Of the request that is out; there is at most one at a time.
        self._rid: str | None = None
        self._started_s = 0.0
        self._has_fate = True
        self._is_unwanted = False
        # It is to become the answer now or never, so it isn't sent again.
        self._is_due = False
        self._is_answer = False
        self._overlapped_s = 0.0
        self._inside = False
        self._task = self._loop.create_task(self._run(pause_s))

    @property
    def messages(self) -> Any:
        """What it asks."""
        return self._options["messages"]

    def admitted(self) -> None:
        """For the gate, which calls it on any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._enter)

    async def promote(self, search_ended_s: float) -> bool:
        """Whether it is the answer, now that its documents turned out to be the final ones.

        What is complete doesn't wait for the server, which is told all the same: it counts answers
        by that.
        """
        if self._rid is None or self._error is not None:
            return False
        self._is_due = True
        promoted = self._server.promote(self._rid, self._task.done)
        either: set[asyncio.Future[Any]] = {promoted, self._task}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        is_complete = self._task.done() and self._error is None and bool(self._events)
        self._is_answer = is_complete if self._task.done() else promoted.result()
        if self._is_answer:
            self._overlapped_s = search_ended_s - self._started_s
            self._leave()
            self._note_kept()
        return self._is_answer

    def discard(self) -> None:
        """It isn't the answer: end it in the background."""
        if not self._has_fate:
            self._decide(RetrievalReport(cancelled=1))
            self._is_unwanted = True
            if self._task.done():
                self._count_waste()
        self._server.gate.withdraw(self)
        if self._rid is None:
            self._task.cancel()
        else:
            self._server.in_flight.discard(self)

    async def result(self) -> Any:
        """What `create` returns, if it is no stream; raises what it raises."""
        await asyncio.wait([self._task])
        if self._error is not None:
            raise self._error
        return self._server.connection.typed(self._events[0], is_chunk=False)

    async def chunks(self) -> AsyncGenerator[Any, None]:
        """The chunks of a stream: first all there are, then the rest as it comes."""
        handed_out = 0
        try:
            while handed_out < len(self._events) or not self._task.done():
                self._news.clear()
                if handed_out == len(self._events):
                    await self._news.wait()
                    continue
                yield self._server.connection.typed(self._events[handed_out], is_chunk=True)
                handed_out += 1
        finally:
            if not self._task.done():
                self.discard()
        if self._error is not None:
            raise self._error

    async def _run(self, pause_s: float) -> None:
        gate = self._server.gate
        try:
            await asyncio.sleep(pause_s)
            for attempt in itertools.count():
                if gate.enter(self):
                    self._inside = True
                else:
                    if attempt == 0:
                        self._log.add(RetrievalReport(withheld=1))
                    await self._admission.wait()
                    self._admission.clear()
                if not await self._is_turned_away():
                    return
                self._leave()
        finally:
            self._leave()
            if self._is_unwanted:
                self._count_waste()
            # The task counts as done only after this step.
            self._loop.call_soon(self._news.set)

    def _enter(self) -> None:
        if self._task.done():
            self._server.gate.leave()
        else:
            self._inside = True
            self._admission.set()

    def _leave(self) -> None:
        if self._inside:
            self._inside = False
            self._server.gate.leave()

    async def _is_turned_away(self) -> bool:
        """Send it once; whether it is to be sent again, as the server had no room after all."""
        self._started_s = time.perf_counter()
        self._has_fate = False
        self._log.add(RetrievalReport(started=1))
        try:
            with self._server.in_flight.sending(self, 1) as ticket:
                (self._rid,) = ticket.rids
                await self._ask(self._rid)
        except Exception as error:
            said = str(error)
            fate = next((name for mark, name in _TURNED_AWAY.items() if mark in said), "failed")
            is_wanted = not (self._has_fate or self._is_due)
            self._decide(RetrievalReport(**{fate: 1}))
            if fate != "failed":
                self._server.gate.shut()
                if is_wanted:
                    self._rid = None
                    self._events.clear()
                    return True
            self._error = error
        return False

    async def _ask(self, rid: str) -> None:
        body = dict(self._options["extra_body"])
        rag = {**body["custom_params"]["rag"], "speculative": True}
        body |= {"rid": rid, "custom_params": {**body["custom_params"], "rag": rag}}
        answers = self._server.connection.answers({**self._options, "extra_body": body})
        async with contextlib.aclosing(answers):
            async for answer in answers:
                self._events.append(answer)
                self._news.set()
                self._note_kept()

    def _note_kept(self) -> None:
        # What fails before it has anything is asked for again.
        if self._is_answer and self._events:
            self._decide(RetrievalReport(kept=1, search_not_overlapped_s=-self._overlapped_s))

    def _count_waste(self) -> None:
        if self._events and (wasted_tokens := computed_tokens_of(self._events[-1])):
            self._log.add(RetrievalReport(wasted_tokens=wasted_tokens))

    def _decide(self, fate: RetrievalReport) -> None:
        if not self._has_fate:
            self._has_fate = True
            self._log.add(fate)
