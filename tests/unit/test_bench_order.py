"""The benchmark of ordering in its smallest configuration: that it runs and reports."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_json_report_has_each_length_of_the_queue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    arguments = ["--queue", "5", "20", "--documents", "60", "--passes", "30", "--json"]
    monkeypatch.setattr(sys, "argv", ["bench_order.py", *arguments])

    importlib.import_module("bench_order").main()

    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["queue"]) == {"5", "20"}
    for length in report["queue"].values():
        assert 0 < length["median_ms"] <= length["p99_ms"]
        assert 0 < length["most_overtakings"] <= report["settings"]["window"]
        assert length["looked_up_per_pass"] < 20
        assert length["tree_nodes"] > 50
