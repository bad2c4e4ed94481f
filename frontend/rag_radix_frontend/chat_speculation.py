"""A chat completion asked for ahead of its documents, which becomes the answer or is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
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
        self._promoted = False
        self._inside = False
        self._task = self._loop.create_task(self._run(pause_s))

    def admitted(self) -> None:
        """For the gate, which calls it on any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._enter)

    async def promote(self, search_ended_s: float) -> bool:
        """Whether it is the answer, now that its documents turned out to be the final ones."""
        rid = self._rid
        if rid is not None:
            with contextlib.suppress(Exception):
                promoted = await self._server.promote(rid, self._task.done)
                self._promoted = promoted and rid == self._rid
        is_complete = self._task.done() and self._error is None and bool(self._events)
        if not (is_complete if self._task.done() else self._promoted):
            return False
        self._leave()
        overlapped_s = search_ended_s - self._started_s
        self._decide(RetrievalReport(kept=1, search_not_overlapped_s=-overlapped_s))
        return True

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
            while True:
                if gate.enter(self):
                    self._inside = True
                else:
                    self._log.add(RetrievalReport(withheld=1))
                    await self._admission.wait()
                    self._admission.clear()
                if not await self._is_turned_away():
                    return
                self._leave()
                gate.shut()
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
        """Send it once; whether the server had no room for it after all."""
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
            was_wanted = not self._has_fate
            self._decide(RetrievalReport(**{fate: 1}))
            if was_wanted and fate != "failed":
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

    def _count_waste(self) -> None:
        if self._events and (wasted_tokens := computed_tokens_of(self._events[-1])):
            self._log.add(RetrievalReport(wasted_tokens=wasted_tokens))

    def _decide(self, fate: RetrievalReport) -> None:
        if not self._has_fate:
            self._has_fate = True
            self._log.add(fate)
