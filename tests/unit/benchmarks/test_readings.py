"""What is read out of intervals and shares of a bound."""

from __future__ import annotations

import pytest
from rag_radix_benchmarks.readings import (
    SchedulingBar,
    never_worse,
    prefill_ratios,
    reading,
    summary,
)


def ratio(low, high):
    return {"value": (low * high) ** 0.5, "low": low, "high": high}


@pytest.mark.parametrize(
    ("low", "high", "reads", "holds"),
    [
        (1.1, 1.5, "faster", True),
        (0.98, 1.02, "equal", True),
        (1.001, 1.01, "faster", True),
        (0.98, 1.0, "equal", True),
        (0.7, 0.9, "slower", False),
        (0.972, 0.99, "slower", True),
        (0.8, 1.2, "open", True),
        (0.99, 1.4, "open", True),
    ],
)
def test_a_ratio_is_read_by_its_interval(low, high, reads, holds):
    assert reading(ratio(low, high)) == reads
    assert never_worse(ratio(low, high)) is holds


def test_one_repeat_says_nothing():
    once = {"value": 1.4, "low": None, "high": None}
    assert reading(once) == "one repeat"
    assert never_worse(once)
    assert not never_worse({**once, "value": 0.9})


def test_readings_are_counted():
    assert summary(["open", "faster", "open"]) == "1 faster, 2 open"


def test_shares_of_a_bound_become_ratios_of_prefill_time():
    # Of 100 seconds the bound saves 40; the arm saves 20 of them and ours 30.
    found = prefill_ratios({"share_of_bound": 0.5}, {"share_of_bound": 0.75}, 0.4)
    assert found == pytest.approx({"reached": 80 / 70, "possible": 80 / 60, "of_rest": 0.5})


@pytest.mark.parametrize("share", [1.0, 1 - 1e-15])
def test_nothing_is_left_of_a_bound_that_is_reached(share):
    found = prefill_ratios({"share_of_bound": share}, {"share_of_bound": 1.0}, 0.4)
    assert found == pytest.approx({"reached": 1.0, "possible": 1.0})
    assert prefill_ratios({"share_of_bound": None}, {"share_of_bound": 1.0}, 0.4) is None


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"a": None}, ""),
        ({"a": 0.0009, "b": None}, "the bar of 1 ms of scheduling a request holds with every arm"),
        ({"a": 0.0009, "b": 0.0012}, "holds with a, not with b"),
        ({"b": 0.0012}, "doesn't hold with b"),
    ],
)
def test_scheduling_is_held_against_its_bar(times, words):
    bar = SchedulingBar.of({arm: {"scheduling_s": each} for arm, each in times.items()})
    assert str(bar) == words if not words else str(bar).endswith(words)
