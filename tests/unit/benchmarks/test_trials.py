"""Finished runs are kept, and known again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rag_radix_benchmarks import trials
from rag_radix_benchmarks.arms import STOCK_ARMS
from rag_radix_benchmarks.facts import Counters
from rag_radix_benchmarks.figures import commit, environment
from rag_radix_benchmarks.trials import ClosedLoop, OpenLoop, Trial, TrialResult, TrialStore
from rag_radix_benchmarks.workload import Recorded
from unit.benchmarks.comparison_data import SETUP, WORKLOAD, result_of

from rag_radix.errors import ConfigError

LRU = STOCK_ARMS["stock-lru"]
HARDWARE = environment()["hardware"]
TRIAL = Trial(SETUP, LRU, WORKLOAD, OpenLoop(1.5), repeat=0)


@pytest.mark.parametrize(
    "other",
    [
        replace(TRIAL, repeat=1),
        replace(TRIAL, load=OpenLoop(1.6)),
        replace(TRIAL, load=ClosedLoop(2)),
        replace(TRIAL, arm=STOCK_ARMS["stock-hicache"]),
        replace(TRIAL, arm=replace(LRU, url="http://elsewhere")),
        replace(TRIAL, workload=replace(WORKLOAD, seed=4)),
        replace(TRIAL, workload=replace(WORKLOAD, burst_window=6)),
        replace(TRIAL, workload=Recorded("trace", "digest", 1, 2, seed=0)),
        replace(TRIAL, setup=replace(SETUP, device_tokens=4096)),
    ],
)
def test_whatever_decides_a_run_is_in_its_key(other):
    assert other.key != TRIAL.key


def test_texts_of_another_seed_are_another_run_of_a_recorded_trace():
    keys = {
        replace(TRIAL, workload=Recorded("trace", "digest", 1, 2, seed=seed)).key for seed in (0, 7)
    }
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("of", "other"),
    [
        ("code_digest", lambda *modules: "of another checkout"),
        ("environment", lambda: {"versions": {"sglang": "0.6"}, "hardware": HARDWARE}),
        (
            "environment",
            lambda: {**environment(), "hardware": {**HARDWARE, "processor": "another"}},
        ),
    ],
)
def test_a_run_of_other_code_or_of_another_machine_is_another_run(monkeypatch, of, other):
    before = TRIAL.key
    trials._measured_by.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(trials, of, other)
        assert TRIAL.key != before
    trials._measured_by.cache_clear()
    assert TRIAL.key == before


def test_a_run_is_found_again_by_another_process(tmp_path):
    path = tmp_path / "runs.jsonl"
    result = result_of(LRU, 0.25, hit_tokens=100)
    TrialStore(path).add(TRIAL, result)
    again = TrialStore(path)
    assert again.get(TRIAL) == result
    assert again.get(replace(TRIAL, repeat=1)) is None


def test_a_line_that_was_cut_off_is_dropped_and_the_next_one_whole(tmp_path):
    path = tmp_path / "runs.jsonl"
    first, second = result_of(LRU, 0.25), result_of(LRU, 0.5)
    TrialStore(path).add(TRIAL, first)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    store = TrialStore(path)
    store.add(replace(TRIAL, repeat=1), second)
    again = TrialStore(path)
    assert again.get(TRIAL) == first
    assert again.get(replace(TRIAL, repeat=1)) == second


def test_without_a_file_runs_are_kept_in_memory():
    store = TrialStore(None)
    store.add(TRIAL, result_of(LRU, 0.25))
    assert store.get(TRIAL) is not None


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"key": 1}\n')
    with pytest.raises(ConfigError, match=r"runs.jsonl:1 is no finished run"):
        TrialStore(path)


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="can't be kept"):
        TrialStore(tmp_path / "missing" / "runs.jsonl")


def tree_that_evicted(device_tokens, host_tokens):
    tiers = {"device": device_tokens, "host": host_tokens}
    return {tier: {"evicted_tokens": tokens} for tier, tokens in tiers.items()}


def test_what_a_server_counted_during_a_run_is_a_difference():
    parts_s = {"choosing": 1.5, "keeping": 0.5}
    before = Counters(parts_s, {"out": 100, "in": 10}, tree_that_evicted(20, 3))
    parts_s = {"choosing": 1.75, "keeping": 0.625}
    after = Counters(parts_s, {"out": 300, "in": 10}, tree_that_evicted(50, 3))
    known = result_of(LRU, 0.25)
    result = TrialResult.of(known.run, known.facts, before, after)
    assert result.scheduling_parts_s == {"choosing": 0.25, "keeping": 0.125}
    assert result.moved == {"out": 200, "in": 0}
    assert result.tree == after.tree
    assert result.evicted_tokens == {"device": 30, "host": 0}


def test_a_tree_without_a_host_tier_evicts_from_none():
    known = result_of(LRU, 0.25)
    counters = Counters(None, None, {**tree_that_evicted(20, 0), "host": None})
    result = TrialResult.of(known.run, known.facts, counters, counters)
    assert result.evicted_tokens == {"device": 0}


def test_a_server_that_counts_nothing_has_no_differences():
    known = result_of(LRU, 0.25)
    nothing = Counters(None, None, None)
    assert TrialResult.of(known.run, known.facts, nothing, nothing) == replace(
        known, commit=commit()
    )
