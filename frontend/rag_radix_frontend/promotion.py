"""Telling the server that a speculation has become the answer."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rag_radix_frontend.processes import PerProcess
from rag_radix_frontend.workers import WORKERS

_LOG = logging.getLogger(__name__)

_UNPROMOTED = "speculations can't be promoted, so only complete ones are used: %s"

_KNOWN = ("running", "finished")
_RETRY_S = 0.05
_PATIENCE_S = 0.5
_PATIENCE_AT_EXIT_S = 1.0


@dataclass(slots=True)
class _Question:
    rids: list[str]
    is_over: Callable[[], bool]
    reply: Callable[[bool], None]
    asked_s: float = field(default_factory=time.monotonic)


class Promoter(PerProcess):
    """Asks for promotions in the background, for all that wait together.

    The server answers between two iterations of its scheduler, so a question at a time would
    make the last of many programs wait for many iterations.
    """

    def __init__(self, promote: Callable[[list[str]], Mapping[str, str]]) -> None:
        """`promote` asks the server: the state of each rid, or any exception."""
        self._promote = promote
        super().__init__()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._questions: list[_Question] = []
        self._asking = False

    def ask(
        self, rids: list[str], *, is_over: Callable[[], bool], reply: Callable[[bool], None]
    ) -> None:
        """Have requests promoted; `reply` is called with whether they are, by another thread unless
        none can be started.

        A request may still be on its way, so what the server doesn't know is asked again for a
        while, unless `is_over` says that its fate is known anyway.
        """
        with self._changed:
            self._questions.append(_Question(rids, is_over, reply))
            self._changed.notify_all()
            if self._asking:
                return
            self._asking = True
            # The server counts an answer by this, also when the process ends now.
            atexit.register(self._finish)
            try:
                WORKERS.start(self._run)
                return
            except RuntimeError as error:  # There are as many threads as there may be.
                _LOG.warning(_UNPROMOTED, error)
                self._questions.clear()
                self._stop()
        reply(False)

    def _run(self) -> None:
        while True:
            with self._changed:
                questions, self._questions = self._questions, []
                if not questions:
                    self._stop()
                    return
            unknown = self._ask(questions)
            if unknown:
                with self._changed:
                    if not self._questions:
                        self._changed.wait(_RETRY_S)
                    self._questions += unknown

    def _stop(self) -> None:
        self._asking = False
        self._changed.notify_all()
        atexit.unregister(self._finish)

    def _finish(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._asking, _PATIENCE_AT_EXIT_S)

    def _ask(self, questions: list[_Question]) -> list[_Question]:
        """Ask once; returns the questions that are to be asked again."""
        try:
            states = self._promote([rid for question in questions for rid in question.rids])
        except Exception as error:
            _LOG.warning(_UNPROMOTED, error)
            for question in questions:
                question.reply(False)
            return []
        unknown = []
        for question in questions:
            if all(states.get(rid) in _KNOWN for rid in question.rids):
                question.reply(True)
            elif question.is_over() or time.monotonic() - question.asked_s > _PATIENCE_S:
                question.reply(False)
            else:
                unknown.append(question)
        return unknown
