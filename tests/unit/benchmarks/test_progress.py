"""What a long measurement says of the time that is left."""

from __future__ import annotations

from rag_radix_benchmarks import progress
from rag_radix_benchmarks.progress import Remaining


def test_what_is_left_is_judged_by_the_steps_that_took_any_time(monkeypatch, capsys):
    # Two steps of a minute and of three, after one that was known.
    clock = iter([0.0, 0.0, 10.0, 70.0, 70.0, 250.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    remaining = Remaining(5)
    for _ in range(3):
        with remaining.one():
            pass
    assert capsys.readouterr().err.splitlines() == [
        "2 of 5 runs, about 3 min left",
        "3 of 5 runs, about 4 min left",
    ]


def test_more_steps_than_foreseen_leave_nothing(monkeypatch, capsys):
    clock = iter([0.0, 60.0, 60.0, 120.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    remaining = Remaining(1)
    for _ in range(2):
        with remaining.one():
            pass
    assert capsys.readouterr().err.splitlines()[-1] == "2 of 1 runs, about 0 min left"
