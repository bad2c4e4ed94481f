"""The requests that states have at the server, and their end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rag_radix_frontend.errors import RequestAborted
from rag_radix_frontend.processes import PerProcess
from rag_radix_frontend.workers import WORKERS

_LOG = logging.getLogger(__name__)

_RETRY_S = 0.1


@dataclass(eq=False)
class _Requests:
    """The requests of a state.

    Attributes:
        rids: Those at the server now.
        ahead: The requests of its speculations.
        speculative: Requests are sent as speculations.
        guesses: All that were sent as speculations.
        cancelled: No more are sent.
    """

    rids: set[str] = field(default_factory=set)
    ahead: weakref.WeakSet[_Requests] = field(default_factory=weakref.WeakSet)
    speculative: bool = False
    guesses: list[str] = field(default_factory=list)
    cancelled: bool = False


class Ticket(NamedTuple):
    """What a request is sent under."""

    rids: list[str]
    speculative: bool


class InFlight(PerProcess):
    """Gives requests their ids, knows which of them are at the server, and ends them.

    A state is any object; its requests are forgotten with it. Safe to share between threads.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        super().__init__()

    def _begin(self) -> None:
        # Reentrant: garbage collection may end a program at any point.
        lock = threading.RLock()
        self._ended = threading.Condition(lock)
        self._more_unwanted = threading.Condition(lock)
        self._of: weakref.WeakKeyDictionary[Any, _Requests] = weakref.WeakKeyDictionary()
        self._unwanted: list[_Requests] = []
        self._aborting = False

    @contextlib.contextmanager
    def sending(self, state: Any, count: int) -> Iterator[Ticket]:
        """Ids for `count` requests of a state, which count as being at the server meanwhile.

        Raises:
            RequestAborted: the state is cancelled.
        """
        rids = [uuid.uuid4().hex for _ in range(count)]
        with self._ended:
            requests = self._of.setdefault(state, _Requests())
            if requests.cancelled:
                raise RequestAborted("the program was cancelled")
            requests.rids.update(rids)
            if requests.speculative:
                requests.guesses += rids
            ticket = Ticket(rids, requests.speculative)
        succeeded = False
        try:
            yield ticket
            succeeded = True
        finally:
            with self._ended:
                if not succeeded:  # what has failed can't be promoted
                    requests.guesses = [rid for rid in requests.guesses if rid not in rids]
                requests.rids.difference_update(rids)
                self._ended.notify_all()

    def speculate(self, state: Any, copy: Any) -> None:
        """From now on the requests of `copy` are speculations of `state`, cancelled with it.

        Raises:
            RequestAborted: the state is cancelled.
        """
        with self._ended:
            requests = self._of.setdefault(state, _Requests())
            if requests.cancelled:
                raise RequestAborted("the program was cancelled")
            self._of[copy] = ahead = _Requests(speculative=True)
            requests.ahead.add(ahead)

    def is_speculative(self, state: Any) -> bool:
        """Whether the requests of a state are speculations now."""
        with self._ended:
            return state in self._of and self._of[state].speculative

    def pause(self, state: Any, pause_s: float) -> None:
        """Wait between two requests of a state, no longer than until it is cancelled."""
        with self._ended:
            requests = self._of.setdefault(state, _Requests())
            self._ended.wait_for(lambda: requests.cancelled, pause_s)

    def make_ordinary(self, copy: Any) -> list[str]:
        """Let all further requests of a speculation be ordinary ones; the ids of those before."""
        with self._ended:
            self._of[copy].speculative = False
            return list(self._of[copy].guesses)

    def is_cancelled(self, state: Any) -> bool:
        """Whether a state's requests were ended from here."""
        with self._ended:
            return state in self._of and self._of[state].cancelled

    def cancel(self, state: Any) -> None:
        """End a state's requests and those of its speculations; returns when they are gone."""
        with self._ended:
            requests = self._of.setdefault(state, _Requests())
            family = [requests, *requests.ahead]
            self._end(family)
            self._ended.wait_for(lambda: not any(one.rids for one in family))

    def discard(self, state: Any) -> None:
        """End a state's requests, without waiting for it."""
        with self._ended:
            if state in self._of:
                self._end([self._of[state]])

    def _end(self, unwanted: list[_Requests]) -> None:
        for requests in unwanted:
            requests.cancelled = True
        self._ended.notify_all()
        self._unwanted += [requests for requests in unwanted if requests.rids]
        if not self._unwanted:
            return
        self._more_unwanted.notify()
        if not self._aborting:
            self._aborting = True
            try:
                WORKERS.start(self._abort_unwanted)
            except RuntimeError as error:  # There are as many threads as there may be.
                self._aborting = False
                _LOG.warning("requests that are not wanted end by themselves: %s", error)

    def _abort_unwanted(self) -> None:
        asked_s: dict[str, float] = {}
        while True:
            with self._ended:
                self._unwanted = [requests for requests in self._unwanted if requests.rids]
                if not self._unwanted:
                    self._aborting = False
                    return
                now = time.monotonic()
                # The server ignores a rid that it hasn't seen yet, so ask again.
                due = [
                    rid
                    for requests in self._unwanted
                    for rid in requests.rids
                    if now - asked_s.get(rid, -_RETRY_S) >= _RETRY_S
                ]
                if not due:
                    self._more_unwanted.wait(_RETRY_S)
            for rid in due:
                asked_s[rid] = now
                # A server that can't be asked is tried again until the requests have ended.
                with contextlib.suppress(Exception):
                    self._abort(rid)
