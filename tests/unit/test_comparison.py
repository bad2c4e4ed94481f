"""What of a scheduler's time is counted, and into which part."""

from __future__ import annotations

import pytest

from rag_radix import comparison
from rag_radix.comparison import CpuTime


class Thread:
    """A thread's CPU time, which passes when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def thread_time(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Thread:
    thread = Thread()
    monkeypatch.setattr(comparison, "time", thread)
    return thread


def test_what_is_kept_while_a_batch_is_chosen_is_counted_once(thread: Thread) -> None:
    cpu = CpuTime()

    def choose() -> str:
        thread.work(1.0)
        cpu.timed("keeping", lambda: thread.work(2.0))
        return "a batch"

    assert cpu.timed("choosing", choose) == "a batch"
    cpu.timed("keeping", lambda: thread.work(4.0))
    assert cpu.parts_s == {"choosing": 3.0, "keeping": 4.0}


def test_copies_are_in_no_part_and_a_failure_is_counted(thread: Thread) -> None:
    cpu = CpuTime()

    def keep() -> None:
        thread.work(3.0)
        cpu.copying_s += 2.0
        raise ValueError("a page is missing")

    for _ in range(2):
        with pytest.raises(ValueError, match="a page"):
            cpu.timed("keeping", keep)
    assert cpu.parts_s == {"choosing": 0.0, "keeping": 2.0}
