"""RESULTS.md from reports whose figures are known."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from rag_radix_benchmarks.study_changes import other_options
from rag_radix_benchmarks.study_file import read_study
from rag_radix_benchmarks.study_report import write_report
from rag_radix_benchmarks.study_results import Measured, Results
from unit.benchmarks.comparison_data import example_report

pytest.importorskip("matplotlib")

ABOUT = {
    "versions": {"sglang": "0.5.23"},
    "hardware": {"cores": 2, "processor": "a processor", "memory_bytes": 2**34},
}


def command_of(part, quick=False):
    """Of the part's first step, as a study keeps it."""
    step = part.steps[0]
    words = ["rag-radix", "bench", step.bench, "--model-path", "MODEL", *step.arguments(quick)]
    return shlex.join([*words, *(("--", *part.server_flags) if part.server_flags else ())])


def spread(median):
    return {"min": median / 2, "median": median, "max": 2 * median}


def ratio(value):
    return {"value": value, "low": value / 2, "high": 2 * value, "pairs": 3}


def speculation_report():
    figures = {"search_not_overlapped_s": spread(0.1), "mean_ttft_s": spread(0.5)}
    return {
        "benchmark": "speculation",
        "cases": [
            {
                "search": "remote",
                "fraction": 0.25,
                "load": 0.5,
                "arms": {arm: {**figures, "kept": spread(0.9)} for arm in ("on", "off")},
                "ratios": {"search_not_overlapped_s": ratio(4.0), "mean_ttft_s": ratio(1.5)},
                "answers": {"compared": 42, "different": 1},
            }
        ],
        "commit": "beef",
    }


def scheduling_report():
    report = example_report()
    for by_arm in report["loads"].values():
        by_arm["stock-lru"]["scheduling_s"] = 0.00125
    return report


@pytest.fixture
def study():
    return read_study("cpu")


@pytest.fixture
def text(study, tmp_path):
    """Of a main part in full, quick parts on speculation and scheduling, and nothing else."""
    results = Results(tmp_path / "results")
    for name, report, quick in (
        ("main", example_report(), False),
        ("speculation", speculation_report(), True),
        ("scheduling", scheduling_report(), True),
    ):
        part = study.part(name)
        command = command_of(part, quick)
        results.put(part, part.steps[0], quick, {**report, **ABOUT, "command": command})
    write_report(study, results, tmp_path / "RESULTS.md")
    return (tmp_path / "RESULTS.md").read_text()


def rows_of(text, start):
    return [line for line in text.splitlines() if line.startswith(f"| {start}")]


def test_every_part_stands_in_the_overview(study, text):
    overview = rows_of(text, "[")
    assert len(overview) == len(study.parts)
    extents = {line.rsplit("|", 2)[1].strip() for line in overview}
    assert extents == {"in full", "quick", "not run"}
    assert "`stock-lru` 2.00 (2.00..2.00), faster" in overview[0]
    (scheduling,) = (line for line in overview if "Scheduling time" in line)
    assert "1 request/s: `stock-lru` 1.25 ms; 0 of 1 keep the bar of 1 ms<br>2" in scheduling
    bar = "the bar of 1 ms of scheduling a request doesn't hold with stock-lru."
    assert f"With 1 request/s {bar} With 2 requests/s {bar}" in text
    found = "search 4.00 (2.00..8.00), TTFT 1.50 (0.75..3.00), open"
    assert f"remote, load 0.5: {found}" in text
    assert "| 1.50 (0.75..3.00) | open | 90% | 41 of 42 |" in text


def test_ratios_are_read_and_stand_beside_what_the_bound_allows(text):
    row, *_ = (line for line in rows_of(text, "`no-cache`") if "4.00 (4.00" in line)
    assert "| 4.00 (4.00..4.00) | faster |" in row
    assert "of the tokens in documents and saves" in text
    assert "With all documents kept, at most" in text
    assert "10 of 20 answers" not in text
    assert "20 of 20 answers of `no-cache` are those of `stock-hicache`" in text


def test_throughputs_commands_and_charts_are_in_the_part(text, tmp_path):
    assert "under five times no-cache's at the lowest rate" in text
    assert "```\nrag-radix bench ab --model-path MODEL --documents" in text
    for chart in ("main", "main-over-rate", "speculation"):
        assert f"](results/{chart}.png)" in text
        assert (tmp_path / "results" / f"{chart}.png").stat().st_size > 1000


def test_a_part_gives_the_reason_of_its_figures(study, tmp_path):
    part = replace(study.part("main"), reason="Half of it is *noise*.\n")
    results = Results(tmp_path / "results")
    results.put(
        part, part.steps[0], False, {**example_report(), **ABOUT, "command": command_of(part)}
    )
    write_report(replace(study, parts={"main": part}), results, tmp_path / "RESULTS.md")
    assert "\n\nWhy: Half of it is *noise*.\n" in (tmp_path / "RESULTS.md").read_text()


def test_the_steps_of_a_ladder_are_ratios_of_neighbours_and_other_prompts_stand_apart(
    study, tmp_path
):
    report = example_report()
    tree = "knowledge-tree+cached_first"
    arms = f"no-cache,stock-lru,stock-hicache,other={tree}"
    for load, by_arm in report["loads"].items():
        by_arm["other"] = by_arm["stock-lru"]
        report["ratios"][load]["other"] = report["ratios"][load]["stock-lru"]
    report["config"]["arms"] = arms
    ladder = ("no-cache", "absent", "stock-lru", "stock-hicache")
    part = replace(study.part("main"), ladder=ladder)
    results = Results(tmp_path / "results")
    results.put(part, part.steps[0], False, {**report, **ABOUT, "command": command_of(part)})
    write_report(replace(study, parts={"main": part}), results, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text()
    first_load, _, apart = text.partition("Step by step: 1 request/s")[2].partition("Apart, ")
    steps = rows_of(first_load, "`")
    assert [row.split(" | ")[0] for row in steps] == [
        "| `no-cache` → `stock-lru`",
        "| `stock-lru` → `stock-hicache`",
        "| `no-cache` → `stock-hicache`",
    ]
    assert "| 2.00 (2.00..2.00) | faster |" in steps[0]
    assert "| 4.00 (4.00..4.00) | faster |" in steps[2]
    assert rows_of(apart, "`")[0].startswith("| `stock-hicache` → `other` | 0.50 (0.50..0.50)")


def test_what_was_not_run_says_by_which_command_it_is(text):
    assert "**Not run**: `rag-radix bench study --part throughput`." in text


def test_every_part_says_what_it_was_measured_on(text):
    about = "Measured on 2 cores of a processor with 16 GiB; sglang 0.5.23; commit"
    assert text.count(f"{about} c0ffee.") == 2
    assert text.count(f"{about} beef.") == 1
    assert "earlier options" not in text


def test_a_part_whose_options_have_changed_since_is_marked(study, tmp_path):
    options = ("--arms", "a,b", "--k", "1", "--repeats", "7")
    step = replace(study.part("main").steps[0], options=options)
    part = replace(study.part("main"), steps=(step,), server_flags=("--dtype", "float32"))
    results = Results(tmp_path / "results")
    then = "rag-radix bench ab --model-path MODEL --arms a,b --page-size 4 --k 1 --repeats 2 --"
    results.put(part, part.steps[0], False, {**example_report(), **ABOUT, "command": then})
    write_report(replace(study, parts={"main": part}), results, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text()
    assert rows_of(text, "[")[0].endswith("| in full, with earlier options |")
    changed = "`--page-size 4`, now left out; `--repeats 2`, now `--repeats 7`; "
    changed += "without `--dtype float32`."
    assert f"**{part.steps[0].label}: measured with earlier options**: {changed}" in text


def test_another_model_is_another_option_and_another_place_of_a_peer_is_not(study):
    step = replace(study.part("peers").steps[0], options=("--model-path", "a", "--arms", "b@PEER"))
    part = replace(study.part("peers"), steps=(step,), server_flags=())
    command = "rag-radix bench ab --model-path MODEL --arms b@http://127.0.0.1:80"
    same = {"command": command, "config": {"model_path": "a"}}
    assert other_options(part, Measured(step, same, False)) == []
    other = {**same, "config": {"model_path": "c"}}
    (changed,) = other_options(part, Measured(step, other, False))
    assert changed == "`--model-path c`, now `--model-path a`"
