"""Speculation while one retrieval runs: which documents are guessed, and what becomes of it.

Dynamic speculative pipelining after RAGCache (Jin et al., 2024, section 5.3, Algorithm 2).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from rag_radix_frontend.gate import Gate
from rag_radix_frontend.in_flight import InFlight
from rag_radix_frontend.ordering import Documents, text_identity
from rag_radix_frontend.promotion import Promoter
from rag_radix_frontend.retrieval_report import RetrievalLog, RetrievalReport
from rag_radix_frontend.run_ahead import Call, next_call
from rag_radix_frontend.sglang_lang import RagStreamExecutor
from rag_radix_frontend.speculation import Speculation


class Speculator:
    """Makes requests ahead on an endpoint, and adds up what has become of all of them."""

    def __init__(
        self,
        gate: Gate,
        in_flight: InFlight,
        promoter: Promoter,
        identity: Callable[[Call], object],
    ) -> None:
        self.gate = gate
        self.log = RetrievalLog()
        self._in_flight = in_flight
        self._promoter = promoter
        self._identity = identity

    def start(
        self,
        executor: RagStreamExecutor,
        call: Call,
        log: RetrievalLog,
        over: Callable[[Speculation], None],
    ) -> Speculation:
        """Send a call that the gate has let through, on behalf of the program of `executor`.

        Raises:
            RequestAborted: the program is cancelled.
        """
        self._in_flight.speculate(executor, call.state)
        identity = self._identity(call)
        log.add(RetrievalReport(started=1))
        return Speculation(
            call,
            identity,
            in_flight=self._in_flight,
            promoter=self._promoter,
            gate=self.gate,
            log=log,
            over=over,
        )


class Pipeline:
    """One retrieval of a program: timed, and guessed at while it runs.

    There is at most one speculation at a time, for the latest documents. `guess` and `finish` are
    called on the state's thread; `_try` also on the program's, when it appends something,
    `admitted` on any and `_over` on the speculation's.
    """

    def __init__(
        self,
        executor: RagStreamExecutor,
        name: str,
        render: Callable[[Documents], str],
        *,
        speculator: Speculator | None,
        total: RetrievalLog | None,
    ) -> None:
        """Without a speculator, nothing is guessed.

        `render` makes the text that the documents are in the program, which calls it `name`.
        """
        self._executor = executor
        self._name = name
        self._render = render
        self._speculator = speculator
        self._log = RetrievalLog(total, partial(executor.meta_info.__setitem__, name))
        self._started_s = time.perf_counter()
        self._stages = 0
        self._lock = threading.RLock()
        # The latest documents, what they make the program ask, and the speculation that asks it.
        self._documents: Documents = ()
        self._text: str | None = None
        self._call: Call | None = None
        self._speculation: Speculation | None = None
        executor.on_submit = self._try

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.on_submit = None
        with self._lock:
            self._forget()

    @property
    def guesses(self) -> bool:
        """Whether it makes something of provisional documents."""
        return self._speculator is not None

    def guess(self, documents: Documents) -> None:
        """The search has found these documents so far; none: nothing that can be guessed at."""
        self._stages += 1
        if self._speculator is None:
            return
        with self._lock:
            if _same(documents, self._documents):
                return
            self._forget()
            self._documents = documents
            # A template may not be made for a document that isn't in the result.
            with contextlib.suppress(Exception):
                self._text = self._render(documents) if documents else None
            self._try()

    def finish(self, documents: Documents) -> str:
        """The search ends with these documents; returns them rendered."""
        ended_s = time.perf_counter()
        text = self._render(documents)
        with self._lock:
            if self._speculation is not None and text == self._text:
                self._speculation.promote(ended_s)
                self._executor.kept, self._speculation = self._speculation, None
            self._forget()
        search_s = ended_s - self._started_s
        self._log.add(
            RetrievalReport(
                retrievals=1,
                stages=self._stages + 1,
                search_s=search_s,
                search_not_overlapped_s=search_s,
            )
        )
        return text

    def admitted(self) -> None:
        with self._lock:
            if self._call is not None and self._speculation is None:
                # It may have come back for other documents meanwhile.
                self._gate.withdraw(self)
                self._start(self._call)
            else:
                self._gate.leave()

    def _try(self) -> None:
        """Speculate on the latest documents, if the program has said how it goes on."""
        with self._lock:
            if self._text is None or self._call is not None:
                return
            self._call = next_call(self._executor, self._name, self._text)
            if self._call is None:
                return
            if self._gate.enter(self):
                self._start(self._call)
            else:
                self._log.add(RetrievalReport(withheld=1))

    def _start(self, call: Call) -> None:
        assert self._speculator is not None
        try:
            self._speculation = self._speculator.start(self._executor, call, self._log, self._over)
        except Exception:
            # The program is cancelled, or asks what can't be asked: it fails when its turn comes.
            self._gate.leave()

    def _over(self, speculation: Speculation) -> None:
        if not speculation.turned_away:
            return
        self._gate.shut()
        with self._lock:
            if self._speculation is speculation and self._call is not None:
                self._speculation = None
                if self._gate.enter(self):
                    self._start(self._call)

    def _forget(self) -> None:
        if self._speculator is None:
            return
        self._gate.withdraw(self)
        if self._speculation is not None:
            self._speculation.discard()
        self._documents, self._text, self._call, self._speculation = (), None, None, None

    @property
    def _gate(self) -> Gate:
        assert self._speculator is not None
        return self._speculator.gate


def _same(documents: Documents, others: Documents) -> bool:
    """Whether they are the same text in the same order."""
    return [text_identity(each) for each in documents] == [text_identity(each) for each in others]
