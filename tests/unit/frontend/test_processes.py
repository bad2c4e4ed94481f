"""Forked processes, while the threads of their parent are at work and hold locks."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from rag_radix_frontend import encoders
from rag_radix_frontend.chat_pipeline import _THREADS
from rag_radix_frontend.encoders import SentenceTransformerEncoder
from rag_radix_frontend.gate import Gate
from rag_radix_frontend.in_flight import InFlight
from rag_radix_frontend.pace import Pace
from rag_radix_frontend.promotion import Promoter
from rag_radix_frontend.retrieval_report import RetrievalLog, RetrievalReport
from rag_radix_frontend.workers import WORKERS
from unit.frontend.speculative_server import WAIT_S, eventually


def in_a_forked_process(run: Callable[[], Any]) -> Any:
    """What `run`, in a process that is forked here, returns as JSON."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads
        pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(int(WAIT_S))
            os.write(writing, json.dumps(run()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    assert said, "the process hung or failed"
    return json.loads(said)


class Asked:
    """Something that a server is asked for, which in this process takes until the end."""

    def __init__(self) -> None:
        self.pid, self.began, self.go = os.getpid(), threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        if os.getpid() == self.pid:
            self.began.set()
            self.go.wait(WAIT_S)


@pytest.fixture
def asked() -> Iterator[Asked]:
    asked = Asked()
    yield asked
    asked.go.set()


@contextmanager
def held_by_a_thread(lock: Any) -> Iterator[None]:
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            let_go.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(WAIT_S)
    yield
    let_go.set()
    thread.join()


def test_promotions_are_asked_for_while_the_parent_asks(asked: Asked) -> None:
    promoter = Promoter(lambda rids: asked() or dict.fromkeys(rids, "running"))

    def ask() -> list[bool]:
        replies: list[bool] = []
        promoter.ask(["a"], is_over=lambda: False, reply=replies.append)
        return replies

    parents = ask()
    asked.began.wait(WAIT_S)

    def child() -> list[bool]:
        replies = ask()
        eventually(lambda: replies)
        return replies

    assert in_a_forked_process(child) == [True]
    asked.go.set()
    eventually(lambda: parents == [True])


def test_a_gate_opens_while_the_parents_is_being_asked_for(asked: Asked) -> None:
    gate = Gate(lambda: asked() or 1)

    class Candidate:
        def __init__(self) -> None:
            self.through = threading.Event()

        def admitted(self) -> None:
            self.through.set()

    waiting = Candidate()
    assert not gate.enter(waiting)
    asked.began.wait(WAIT_S)

    def child() -> bool:
        own = Candidate()
        return gate.enter(own) or own.through.wait(WAIT_S)

    assert in_a_forked_process(child)
    asked.go.set()
    assert waiting.through.wait(WAIT_S)


class State:
    """Of a program."""


def test_requests_are_ended_while_the_parent_ends_its_own(asked: Asked) -> None:
    aborted = threading.Event()
    in_flight = InFlight(lambda rid: asked() or aborted.set())
    one, other = State(), State()
    with in_flight.sending(one, 1):
        in_flight.discard(one)
        asked.began.wait(WAIT_S)

        def child() -> bool:
            in_flight.cancel(one)  # it has no requests of its own
            with in_flight.sending(other, 1):
                in_flight.discard(other)
                return aborted.wait(WAIT_S)

        assert in_a_forked_process(child)
        asked.go.set()


def test_a_search_is_timed_while_the_parent_times_one(asked: Asked) -> None:
    pace = Pace(None, asked)
    timing = threading.Thread(target=pace.ends, args=(100,))
    timing.start()
    asked.began.wait(WAIT_S)
    assert in_a_forked_process(lambda: pace.ends(100))[-1] == 100
    asked.go.set()
    timing.join()


class Model:
    """As much of a model as an encoder uses."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self.pid = asked, os.getpid()

    def encode(self, texts: list[str], **_: Any) -> Any:
        self._asked()
        return np.full((len(texts), 1), self.pid)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_model_is_loaded_again_only_while_the_parent_uses_it(
    is_busy: bool, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders.importlib.util, "find_spec", lambda _: True)
    encoder = SentenceTransformerEncoder("name", "model")
    monkeypatch.setattr(encoder, "_load", lambda: Model(asked))
    if not is_busy:
        asked.go.set()
    encoding = threading.Thread(target=encoder.encode, args=(["a"],))
    encoding.start()
    asked.began.wait(WAIT_S)
    if not is_busy:
        encoding.join()
    (made_by,), own = in_a_forked_process(lambda: [encoder.encode(["b"])[0].tolist(), os.getpid()])
    assert made_by == (own if is_busy else os.getpid())
    asked.go.set()
    encoding.join()


def test_no_lock_is_held() -> None:
    log, gate = RetrievalLog(), Gate(lambda: 1)
    log.add(RetrievalReport(started=1))

    def child() -> int:
        gate.shut()
        log.add(RetrievalReport(started=1))
        return log.report.started

    with held_by_a_thread(log._lock), held_by_a_thread(gate._changed):
        assert in_a_forked_process(child) == 2


def test_work_is_done_although_the_threads_are_the_parents() -> None:
    idle = threading.Event()
    WORKERS.start(idle.set)
    _THREADS.pool.submit(idle.wait, WAIT_S).result()
    eventually(lambda: WORKERS._idle and _THREADS.pool._idle_semaphore._value)  # type: ignore[attr-defined]

    def child() -> bool:
        done = threading.Event()
        WORKERS.start(done.set)
        return done.wait(WAIT_S) and _THREADS.pool.submit(lambda: True).result(WAIT_S)

    assert in_a_forked_process(child)
