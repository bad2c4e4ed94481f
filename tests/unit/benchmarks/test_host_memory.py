"""Replays over host memory in their smallest configuration."""

from __future__ import annotations

import argparse

import pytest
from rag_radix_benchmarks import host_memory
from rag_radix_benchmarks.host_memory import add_options, measure, table

from rag_radix.errors import ConfigError


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_options(parser)
    small = ["--documents", "40", "--document-tokens", "60", "--device-tokens", "700"]
    small += ["--requests", "60", "--warm-up", "30", "--repeats", "2"]
    return parser.parse_args([*small, *arguments])


def test_more_host_memory_finds_more_and_no_policy_beats_the_bound():
    report = measure(parsed("--policies", "lru,pgdsf", "--host-percent", "5,80"))
    little, much = report["sizes"]
    assert (little["host_tokens"], much["host_tokens"]) == (120, 1920)
    for policy in ("lru", "pgdsf"):
        rates = [size["policies"][policy]["hit_rate"]["median"] for size in (little, much)]
        assert rates[0] < rates[1] <= much["bound_hit_rate"]["max"]
    header, rows = table(report)
    assert header == ["host tier by corpus", "lru", "pgdsf", "at most"]
    assert [row[0] for row in rows] == ["5%", "80%"]


def test_replays_that_are_done_are_not_run_again(tmp_path, monkeypatch):
    given = ["--out", str(tmp_path), "--host-percent", "50", "--policies"]
    measure(parsed(*given, "lru"))
    run = []

    def replay(trace, variant, *arguments, **more):
        run.append(variant.label)
        return real(trace, variant, *arguments, **more)

    real = host_memory.replay
    monkeypatch.setattr(host_memory, "replay", replay)
    report = measure(parsed(*given, "lru,pgdsf"))
    assert run == ["pgdsf", "pgdsf"]
    assert (
        report["sizes"]
        == measure(parsed("--host-percent", "50", "--policies", "lru,pgdsf"))["sizes"]
    )
    assert "out" not in report["config"]


def test_replays_of_other_code_are_run_again(tmp_path, monkeypatch):
    given = ["--out", str(tmp_path), "--host-percent", "50", "--policies", "lru"]
    expected = measure(parsed(*given))["sizes"]
    monkeypatch.setattr(host_memory, "code_digest", lambda *modules: "another")
    monkeypatch.setattr(host_memory, "replay", None)
    with pytest.raises(TypeError):
        measure(parsed(*given))
    monkeypatch.undo()
    assert measure(parsed(*given))["sizes"] == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--policies", "best"], "'best' doesn't exist"), (["--host-percent", "much"], "'much'")],
)
def test_a_wrong_option_is_named(arguments, named):
    with pytest.raises(ConfigError, match=named):
        measure(parsed(*arguments))
