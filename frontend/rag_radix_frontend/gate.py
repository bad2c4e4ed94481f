"""When a speculation may be sent: the server's word, asked for by one thread for all programs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from rag_radix_frontend.errors import RequestError
from rag_radix_frontend.processes import PerProcess

_LOG = logging.getLogger(__name__)

MAX_SPECULATIONS = 64
_SHORTEST_INTERVAL_S = 0.05
_LONGEST_INTERVAL_S = 0.4

# Unauthorized, forbidden, not found, method not allowed. All others may pass.
_NEVER = (401, 403, 404, 405)
_UNANSWERED = "the server can't be asked whether it takes speculations: %s"


class Candidate(Protocol):
    """A speculation that waits to be sent."""

    def admitted(self) -> None:
        """It may be sent now. Called on any thread; `Gate.leave()` is then due, sent or not."""
        ...


class Gate(PerProcess):
    """Lets speculations through while the server takes them, and at most so many at a time.

    It is shut at first and after every refusal. What comes while it is shut waits, and while
    something waits the server is asked, at intervals that double from 50 ms to 400 ms as long as
    it takes nothing. A server that doesn't know the question gets no speculations at all.
    """

    def __init__(self, ask: Callable[[], int], limit: int = MAX_SPECULATIONS) -> None:
        """`ask` has the server say how many more speculations it would take now.

        It may raise anything; a `RequestError` whose status says that there is no such route, or
        none for this client, means that the server takes no speculations.
        """
        self._ask = ask
        self._limit = limit
        super().__init__()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Candidate, None] = {}
        self._inside = 0
        self._open = False
        self._useless = False
        self._asking = False
        self._asked_s = 0.0
        self._interval_s = 0.0

    def enter(self, candidate: Candidate) -> bool:
        """Whether a candidate may be sent at once; if not, it waits until it may or withdraws."""
        with self._changed:
            if self._useless:
                return False
            if self._open and not self._waiting and self._inside < self._limit:
                self._inside += 1
                return True
            self._waiting[candidate] = None
            self._watch_if_shut()
            return False

    def withdraw(self, candidate: Candidate) -> None:
        with self._changed:
            self._waiting.pop(candidate, None)
            self._changed.notify_all()

    def leave(self) -> None:
        """A speculation that was let through is over, or was not sent after all."""
        with self._changed:
            self._inside -= 1
            admitted = self._admit(1) if self._open else []
        for candidate in admitted:
            candidate.admitted()

    def shut(self) -> None:
        """The server takes no speculations at present."""
        with self._changed:
            if self._open:
                self._open = False
                self._asked_s = time.monotonic()
                self._interval_s = _SHORTEST_INTERVAL_S
                self._watch_if_shut()

    def _watch_if_shut(self) -> None:
        if self._waiting and not self._open and not self._asking:
            self._asking = True
            try:
                threading.Thread(target=self._watch, name="rag-gate", daemon=True).start()
            except RuntimeError as error:  # There are as many threads as there may be.
                self._asking = False
                _LOG.warning(_UNANSWERED, error)

    def _admit(self, room: int) -> list[Candidate]:
        room = min(room, self._limit - self._inside)
        admitted = list(self._waiting)[:room]
        for candidate in admitted:
            del self._waiting[candidate]
        self._inside += len(admitted)
        return admitted

    def _watch(self) -> None:
        while True:
            with self._changed:
                due_s = self._asked_s + self._interval_s
                while self._waiting and (pause_s := due_s - time.monotonic()) > 0:
                    self._changed.wait(pause_s)
                if self._open or self._useless or not self._waiting:
                    self._asking = False
                    return
            room = self._room()
            with self._changed:
                self._asked_s = time.monotonic()
                if room:
                    self._interval_s = _SHORTEST_INTERVAL_S
                else:
                    longer_s = max(2 * self._interval_s, _SHORTEST_INTERVAL_S)
                    self._interval_s = min(longer_s, _LONGEST_INTERVAL_S)
                admitted = self._admit(room)
                self._open = room > 0 and not self._waiting
                if self._useless:
                    self._waiting.clear()
            for candidate in admitted:
                candidate.admitted()

    def _room(self) -> int:
        try:
            return self._ask()
        except RequestError as error:
            if error.status in _NEVER:
                _LOG.info("the server takes no speculations: %s", error)
                self._useless = True
            else:
                _LOG.warning(_UNANSWERED, error)
        except Exception as error:
            _LOG.warning(_UNANSWERED, error)
        return 0
