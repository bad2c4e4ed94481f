"""The series in `/metrics`, and the dashboard that shows them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from tree_harness import harness
from unit.storage.stores import server
from unit.tree.prompts import SYSTEM, prompt

from rag_radix.control import metrics
from rag_radix.control.commands import show_stats
from rag_radix.control.metrics import METRICS, PREFIX, TIME_METRIC, TreeMetrics
from rag_radix.control.pins import Pin
from rag_radix.control.selector import Selector

DASHBOARD = Path(__file__).parents[3] / "dashboards" / "rag-radix.json"


@pytest.fixture
def registry():
    before = set(REGISTRY._collector_to_names)
    yield REGISTRY
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def value(registry, name, **labels):
    return registry.get_sample_value(PREFIX + name, {"dp_rank": "0", **labels})


def test_what_happens_in_the_tree_is_reported(registry):
    with harness(device_tokens=150, host_tokens=400) as h:
        reported = TreeMetrics(h.tree, lambda: {"held_requests": 2, "most_overtakings": 5}, 0)
        for name in ("a", "b", "c", "d", "a", "a"):
            h.serve(*prompt(name))
        h.tree.control.pin(Pin(Selector(id="a"), "host"))
        reported.update()
        counted = h.tree.counters
        assert value(registry, "requests_total") == 6
        assert value(registry, "prompt_tokens_total") == counted.prompt_tokens
        found = [value(registry, "hit_tokens_total", tier=tier) for tier in ("device", "host")]
        assert found == [counted.device_hit_tokens, counted.host_hit_tokens]
        assert value(registry, "missed_tokens_total") == counted.prompt_tokens - sum(found)
        assert value(registry, "documents_total") == 6
        assert value(registry, "missed_documents_total") == 4
        assert value(registry, "saved_prefill_seconds_total") > 0
        assert value(registry, "moved_tokens_total", way="to_host") > 0
        assert value(registry, "moved_bytes_total", way="to_device") > 0
        assert value(registry, "evicted_nodes_total", tier="device") > 0
        assert value(registry, "pinned_tokens", tier="host") == len(SYSTEM) + 40
        assert value(registry, "held_requests_total") == 2
        assert value(registry, "most_overtakings") == 5
        assert value(registry, "capacity_tokens", tier="device") == 150
        assert value(registry, "tree_seconds_count", operation="publish") > 0
        assert value(registry, "tree_seconds_count", operation="evict") > 0


def test_what_storage_does_is_reported(registry, tmp_path):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    with server(tmp_path, policy_config={"preload_host_share": 1}) as second:
        reported = TreeMetrics(second.tree, dict, 0)
        second.wait(lambda: not second.tree.storing.preloading.is_running)
        second.ask(prompt("b"))
        reported.update()
        assert value(registry, "storage_files") == 3
        assert value(registry, "storage_bytes") == second.files.bytes
        assert value(registry, "storage_pages_total", event="read_pages") == len(SYSTEM) + 40
        assert value(registry, "storage_pages_total", event="written_pages") == 40
        assert value(registry, "storage_written_bytes_total") > 0
        assert value(registry, "storage_troubles_total", event="failed_writes") == 0
        assert value(registry, "preloaded_tokens_total") == len(SYSTEM) + 40
        shown = show_stats(second.tree.report())
        assert "MiB in 3 files, 40 pages written, 60 read" in shown
        assert "60 tokens to host, done" in shown


def test_counters_grow_by_what_is_new_once_a_second(registry, monkeypatch):
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock.now_s)
    with harness(device_tokens=1000) as h:
        reported = TreeMetrics(h.tree, dict, 0)
        h.serve(*prompt("a"))
        reported.update()
        h.serve(*prompt("a"))
        reported.update()
        assert value(registry, "requests_total") == 1
        clock.now_s += 1
        reported.update()
        assert value(registry, "requests_total") == 2


def test_there_are_as_many_series_whatever_the_documents(registry):
    def series():
        families = [f for f in registry.collect() if f.name.startswith(PREFIX)]
        return {(s.name, *sorted(s.labels.items())) for f in families for s in f.samples}

    with harness(device_tokens=400, host_tokens=400) as h:
        reported = TreeMetrics(h.tree, dict, 0)
        h.serve(*prompt("a"))
        reported.update()
        before = series()
        for number in range(30):
            h.serve(*prompt(f"d{number}"), extra_key=f"tenant {number}")
        reported._due_s = 0
        reported.update()
        after = series()
        assert {each for each in after - before if "tree_seconds" not in each[0]} == set()
        assert not any(value.startswith("tenant") for each in after for _, value in each[1:])


def test_the_dashboard_shows_what_there_is():
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    shown = {name for each in expressions for name in re.findall(rf"{PREFIX}\w+", each)}
    there_are = {metric.series for metric in METRICS} | {TIME_METRIC + "_bucket"}
    assert shown <= there_are
    labels = {metric.series: {metric.label} for metric in METRICS if metric.label}
    labels[TIME_METRIC + "_bucket"] = {"le", "operation"}
    for expression in expressions:
        for names in re.findall(r"by \(([\w, ]+)\)", expression):
            used = set(re.findall(rf"{PREFIX}\w+", expression)) - {
                PREFIX + "prompt_tokens_total",
                PREFIX + "documents_total",
            }
            assert all(set(names.split(", ")) <= labels.get(each, set()) for each in used)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.slow
def test_the_series_of_a_scheduler_are_seen_by_the_process_that_answers(tmp_path):
    # A registry of several processes has to be named before Prometheus is imported.
    program = """
from tree_harness import harness
from unit.tree.prompts import prompt
from rag_radix.control.metrics import TreeMetrics
with harness(device_tokens=1000, host_tokens=1000) as h:
    reported = TreeMetrics(h.tree, dict, 3)
    h.serve(*prompt("a"))
    reported.update()
"""
    answer = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    shown = ""
    for each in (program, answer):
        command = [sys.executable, "-W", "ignore", "-c", each]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        shown = done.stdout
    for metric in METRICS:
        assert re.search(rf'^{metric.series}{{[^}}]*dp_rank="3"', shown, re.MULTILINE), (
            metric.series
        )
    assert re.search(r"^rag_radix_requests_total{.*} 1\.0", shown, re.MULTILINE)
    bucket = r'^rag_radix_tree_seconds_bucket{dp_rank="3",le="1\.0",operation="publish"}'
    assert re.search(bucket, shown, re.MULTILINE)
