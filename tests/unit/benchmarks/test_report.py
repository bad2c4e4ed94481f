"""The report of a comparison, as text, as Markdown and as charts."""

from __future__ import annotations

import json

import pytest
from rag_radix_benchmarks.experiment import turn
from rag_radix_benchmarks.report import as_text, sections, write
from rag_radix_benchmarks.results import HITS
from unit.benchmarks.comparison_data import ARMS, example_report


@pytest.fixture
def report():
    return example_report()


def test_every_arm_and_ratio_is_on_the_terminal(report):
    text = as_text(report)
    lines = text.splitlines()
    assert sum(line.startswith("stock-lru ") for line in lines) == 2 * 3 + 2
    assert "2.00 (2.00..2.00)" in text
    assert "4.00 (4.00..4.00)" in text
    assert "0 of 20 answers of no-cache differ" in text
    assert "hold all that a run used" in text


def test_the_99th_percentile_of_few_requests_is_not_shown(report):
    few = [set(each.header) for each in sections(report)]
    assert not any("p99" in header for header in few)
    for by_arm in report["loads"].values():
        for figures in by_arm.values():
            figures["requests"] = 199
    # 199 in all, but no 100 in each of two runs.
    times, ratios = list(sections(report))[:2]
    assert "p99" in times.header
    assert "p99" not in ratios.header


def test_answers_to_other_prompts_are_not_compared(report):
    report["config"]["arms"] = "no-cache,stock-lru+canonical,stock-hicache"
    report["answers"]["stock-lru+canonical"] = report["answers"].pop("stock-lru")
    text = as_text(report)
    assert "stock-lru+canonical has prompts, and so answers, of its own" in text
    assert "20 answers of no-cache differ" in text
    assert "answers of stock-lru+canonical differ" not in text


def test_runs_of_several_commits_are_said_to_be(report):
    assert "several commits" not in as_text(report)
    assert "several commits: c0ffee, None" in as_text({**report, "commits": ["c0ffee", None]})


def test_hits_that_nobody_counted_are_shown_as_unknown(report, tmp_path):
    pytest.importorskip("matplotlib")
    for by_arm in report["loads"].values():
        by_arm["no-cache"] |= dict.fromkeys(HITS)
    cache = next(each for each in sections(report) if "tokens found" in each.header)
    unknown, known, _ = cache.rows
    assert unknown[1:8] == ["-"] * 7
    assert "-" not in known[1:7]
    write(report, tmp_path)


def test_throughput_is_the_reference_by_the_arm(report):
    found = report["throughput"]["own_limit"]
    assert found["stock-lru"]["reference_by_this"]["value"] == pytest.approx(2)
    assert found["no-cache"]["reference_by_this"] is None


def test_a_folder_gets_markdown_numbers_and_charts(report, tmp_path):
    pytest.importorskip("matplotlib")
    write(report, tmp_path)
    text = (tmp_path / "report.md").read_text()
    charts = {path.name for path in tmp_path.glob("*.png")}
    assert charts == {"times.png", "hit_rates.png", "ratios.png", "over_rate.png"}
    assert all(f"({name})" in text for name in charts)
    assert "rag-radix bench ab --arms 'a,b c'" in text
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report))


def test_every_arm_comes_first_and_order_is_turned_round():
    orders = [[arm.name for arm in turn(ARMS, repeat)] for repeat in range(6)]
    assert orders[1] == orders[0][::-1]
    assert {order[0] for order in orders} == {arm.name for arm in ARMS}
    assert all(sorted(order) == sorted(arm.name for arm in ARMS) for order in orders)
