"""What a run of a comparison serves, and when it is due."""

from __future__ import annotations

import pytest
from rag_radix_benchmarks.workload import Part, Recorded
from unit.benchmarks.comparison_data import WORKLOAD

from rag_radix.errors import ConfigError
from rag_radix.replay.trace import TraceDocument, TraceRequest, write_trace


def requests(arrivals):
    return tuple(TraceRequest(arrival_s, (), 10) for arrival_s in arrivals)


def test_arrivals_keep_their_proportions_at_another_mean_rate():
    part = Part((), requests([100, 101, 104, 106]))
    assert part.due_s(requests_per_s=5) == pytest.approx([0, 0.1, 0.4, 0.6])


def test_requests_that_came_at_once_are_due_at_once():
    assert Part((), requests([7, 7])).due_s(2.0) == [0, 0]
    assert Part((), requests([7])).due_s(2.0) == [0]


def test_a_repeat_is_the_same_every_time_and_another_than_the_next():
    assert WORKLOAD.part(0) == WORKLOAD.part(0)
    assert WORKLOAD.part(0) != WORKLOAD.part(1)
    assert len(WORKLOAD.part(1).warm_up) == WORKLOAD.warm_up
    assert len(WORKLOAD.part(1).measured) == WORKLOAD.requests


def test_repeats_take_consecutive_parts_of_a_trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = [
        TraceRequest(float(i), (TraceDocument(f"d{i}", "", 0, 5),), prompt_tokens=9)
        for i in range(7)
    ]
    write_trace(path, trace)
    recorded = Recorded.open(path, warm_up=1, requests=2, repeats=2, seed=0)
    assert recorded.part(1) == Part(tuple(trace[3:4]), tuple(trace[4:6]))


def test_a_trace_file_too_short_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, requests(range(5)))
    with pytest.raises(ConfigError, match=r"has 5 requests, 2 repeats of 1 \+ 2 need 6"):
        Recorded.open(path, warm_up=1, requests=2, repeats=2, seed=0)
