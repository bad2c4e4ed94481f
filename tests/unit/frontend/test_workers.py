from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from rag_radix_frontend.workers import Workers
from unit.frontend.speculative_server import WAIT_S, eventually

pytestmark = pytest.mark.usefixtures("no_threads_left")


def test_a_thread_that_is_idle_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_radix_frontend.workers._IDLE_S", WAIT_S)
    workers, threads = Workers(), []
    for count in range(1, 4):
        workers.start(lambda: threads.append(threading.current_thread()))
        eventually(lambda: len(threads) == count and workers._idle)  # noqa: B023
    assert len(set(threads)) == 1
    workers._idle[0].put(lambda: monkeypatch.setattr("rag_radix_frontend.workers._IDLE_S", 0.0))


def test_work_never_waits_for_other_work() -> None:
    workers, all_there = Workers(), threading.Barrier(20)
    done: list[int] = []

    def work(i: int) -> Callable[[], None]:
        return lambda: done.append(i) if all_there.wait(WAIT_S) >= 0 else None

    for i in range(20):
        workers.start(work(i))
    eventually(lambda: len(done) == 20)


def test_no_work_is_lost_while_threads_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_radix_frontend.workers._IDLE_S", 0.0005)
    workers = Workers()
    done: list[int] = []

    def start() -> None:
        for i in range(500):
            workers.start(lambda i=i: done.append(i))  # type: ignore[misc]
            time.sleep(0.0005)

    starters = [threading.Thread(target=start) for _ in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    eventually(lambda: len(done) == 2_000)
    assert sorted(done) == sorted([*range(500)] * 4)
