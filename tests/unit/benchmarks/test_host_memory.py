"""Replays over host memory in their smallest configuration."""

from __future__ import annotations

import argparse

import pytest
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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--policies", "best"], "'best' doesn't exist"), (["--host-percent", "much"], "'much'")],
)
def test_a_wrong_option_is_named(arguments, named):
    with pytest.raises(ConfigError, match=named):
        measure(parsed(*arguments))
