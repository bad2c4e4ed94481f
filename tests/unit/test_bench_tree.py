"""The tree benchmark in its smallest configuration: that it runs and reports, not how fast."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def threads_kept() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_json_report_compares_all_trees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    arguments = ["--nodes", "20", "40", "--rounds", "2", "--requests", "3", "--json"]
    monkeypatch.setattr(sys, "argv", ["bench_tree.py", *arguments])
    # Less than SGLang leaves alone, but more than enough.
    available = SimpleNamespace(available=8 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)

    importlib.import_module("bench_tree").main()

    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    trees = report["sizes"]["40"]["trees"]
    assert [trees[name]["core"] for name in ("knowledge", "stock-python", "stock-rust")] == [
        "KnowledgeTreeCore",
        "UnifiedTreeCore",
        "RustUnifiedTreeCore",
    ]
    for tree in trees.values():
        assert 0 < tree["median_s"] <= tree["p99_s"]
        assert tree["device_hit_tokens"] > 0
        assert tree["host_hit_tokens"] > 0
        assert tree["phases_per_request"]["evict"]["calls"] > 0
    assert report["median_ms"] == trees["knowledge"]["median_s"] * 1e3
    assert set(report["ratio"]) == {"stock-python", "stock-rust"}
    assert set(report["growth"]) == set(trees)
