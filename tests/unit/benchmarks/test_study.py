"""A study: its file, its parts as commands, and the report that is written from results."""

from __future__ import annotations

import argparse
import json
import shlex

import pytest
from rag_radix_benchmarks import study as module
from rag_radix_benchmarks.ab_options import Plan
from rag_radix_benchmarks.command import benchmark
from rag_radix_benchmarks.study_estimate import SEARCHED_SHARES, comparison_minutes
from rag_radix_benchmarks.study_file import Machine, last_of_each, read_study
from rag_radix_benchmarks.study_results import Results

from rag_radix.errors import ConfigError

FILE = """
title = "A study"
conditions = "Small."
common = "--documents 40 --document-tokens 100 --repeats 2"
common_quick = "--requests 5"

[machine]
prompt_tokens_per_s = 1000
server_start_s = 30

[[part]]
name = "main"
title = "Main comparison"
question = "What is gained?"
paper = "Up to 3.5 times."
options = "--arms stock-lru,knowledge-tree"
server_flags = "--dtype float32"
reason = "Half of it is noise."
ladder = ["stock-lru", "knowledge-tree"]
[[part.step]]
name = "one"
label = "k = 1"
options = "--k 1 --requests 9"
quick = "--warm-up 3"
[[part.step]]
name = "two"
label = "k = 2"
quick = false

[[part]]
name = "memory"
title = "Memory"
question = "How much is enough?"
paper = "More is better."
[[part.step]]
name = "replay"
label = "a replay"
bench = "host-memory"
options = "--documents 30 --document-tokens 50 --device-tokens 700 --policies lru,pgdsf"
quick = "--host-percent 50 --requests 20 --warm-up 10 --repeats 1"
minutes = [3, 1]
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(FILE)
    return path


def run(*arguments):
    parser = argparse.ArgumentParser()
    module.add_options(parser)
    module.run(parser.parse_args(list(map(str, arguments))))


@pytest.mark.parametrize("name", ["cpu", "paper-cuda"])
def test_every_step_of_the_studies_that_come_along_is_a_command_that_parses(name, capsys):
    for part in read_study(name).parts.values():
        assert part.steps_of(quick=True)
        for step in part.steps:
            parser = argparse.ArgumentParser()
            benchmark(step.bench).add_options(parser)
            for quick in (False, True):
                arguments = [*step.arguments(quick), "--model-path", "MODEL"]
                if step.bench == "host-memory":
                    arguments = arguments[:-2]
                parser.parse_args(arguments)


def test_parts_of_the_cpu_study_end_within_the_hour(tmp_path, capsys):
    run("--list", "--model-path", "MODEL", "--results", tmp_path)
    lines = capsys.readouterr().out.splitlines()[1:]
    minutes = {line.split()[0]: tuple(map(int, line.split()[-3:-1])) for line in lines}
    assert set(minutes) == set(read_study("cpu").parts)
    assert all(full <= 60 for full, _ in minutes.values())


def test_quick_options_win_and_may_leave_a_step_out(path):
    part = read_study(str(path)).part("main")
    assert [step.name for step in part.steps_of(quick=True)] == ["one"]
    step = part.steps[0]
    assert step.arguments(quick=False)[-4:] == ["--k", "1", "--requests", "9"]
    assert step.arguments(quick=True)[-4:] == ["--requests", "5", "--warm-up", "3"]
    assert "9" not in step.arguments(quick=True)
    assert part.server_flags == ("--dtype", "float32")
    assert part.reason == "Half of it is noise."
    assert part.ladder == ("stock-lru", "knowledge-tree")


def test_the_last_of_options_that_exclude_each_other_is_kept():
    given = shlex.split("--loads 0.5 --fractions 1 2 --quick --fractions 3 --rates 4 -- --loads 9")
    assert last_of_each(given) == shlex.split("--quick --fractions 3 --rates 4 -- --loads 9")


def test_a_part_is_measured_kept_and_reported(path, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report = tmp_path / "docs" / "RESULTS.md"
    report.parent.mkdir()
    places = ["--results", tmp_path / "r", "--work", tmp_path / "w"]
    run("--study", path, "--part", "memory", "--quick", *places)
    assert "a replay: hit rate" in capsys.readouterr().out
    run("--study", path, "--results", tmp_path / "r", "--write", report)
    text = report.read_text()
    assert "a replay: quick version" in text
    assert "rag-radix bench host-memory --documents 30" in text
    assert "**Not run**: `rag-radix bench study --part main`" in text
    assert "](results/memory.png)" in text
    assert (tmp_path / "docs" / "results" / "memory.png").exists()


def test_a_part_that_goes_on_says_so_of_the_time_that_it_took(path, tmp_path, capsys):
    common = ["--study", path, "--results", tmp_path / "r", "--work", tmp_path / "w"]
    common += ["--model-path", "MODEL"]
    for listed in ("0 quick", "0+ quick"):
        run(*common, "--part", "memory", "--quick")
        capsys.readouterr()
        run(*common, "--list")
        main, memory = capsys.readouterr().out.splitlines()[1:]
        assert main.endswith(" -")
        assert memory.endswith(f" {listed}")


@pytest.mark.parametrize("first", ["stock-lru", "no-cache"])
def test_a_search_under_the_limit_of_no_cache_takes_its_time_too(first):
    parser = argparse.ArgumentParser()
    benchmark("ab").add_options(parser)
    options = ["--model-path", "MODEL", "--arms", f"{first},knowledge-tree", "--repeats", "1"]
    options += ["--throughput", "--concurrency", "2", "--warm-up", "0", "--requests", "10"]
    plan = Plan.of(parser.parse_args(options))
    tokens = sum(request.prompt_tokens for request in plan.workload.part(0).measured)
    machine = Machine(prompt_tokens_per_s=tokens, server_start_s=0)
    # A run at capacity takes a second: of the closed loop two, one for the capacity.
    searches = sum(1 / min(share, 1) for share in SEARCHED_SHARES)
    seconds = 2 + 1 + 2 * searches + (4 if first == "no-cache" else 0)
    assert comparison_minutes(plan, True, machine) == pytest.approx(seconds / 60)


def test_the_full_version_of_a_step_comes_before_the_quick_one(path, tmp_path):
    part = read_study(str(path)).part("memory")
    results = Results(tmp_path)
    results.put(part, part.steps[0], True, {"n": 1})
    assert [(each.quick, each.report["n"]) for each in results.of(part)] == [(True, 1)]
    results.put(part, part.steps[0], False, {"n": 2})
    assert [(each.quick, each.report["n"]) for each in results.of(part)] == [(False, 2)]


def test_a_comparison_is_given_its_place_and_its_command_is_kept(path, tmp_path, monkeypatch):
    asked = []

    def measure(options):
        asked.append(options)
        config = {"model_path": options.model_path, "arms": options.arms}
        bound = {"saved_share": 0.4, "document_hit_rate": 0.3}
        return {
            "benchmark": "ab",
            "config": config,
            "reference": "knowledge-tree",
            "bound": bound,
            "loads": {},
            "throughput": None,
        }

    monkeypatch.setattr(benchmark("ab"), "measure", measure)
    common = ["--study", path, "--results", tmp_path / "r", "--work", tmp_path / "w"]
    run(*common, "--part", "main", "--quick", "--model-path", "/a/model", "--", "--seed", "7")
    (options,) = asked
    assert (options.requests, options.warm_up, options.seed) == (5, 3, 7)
    assert options.server_flags == ["--dtype", "float32"]
    assert options.out == tmp_path / "w" / "main-one-quick"
    kept = json.loads((tmp_path / "r" / "main-one.quick.json").read_text())
    assert kept["command"].startswith("rag-radix bench ab --model-path MODEL --documents 40")
    assert kept["command"].endswith("--seed 7 -- --dtype float32")
    assert str(tmp_path) not in kept["command"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--study", "gpu"], "'gpu' doesn't exist.*cpu, paper-cuda"),
        (["--part", "mian"], "'mian': the study 'cpu' has main"),
        (["--part", "main"], "give --model-path"),
        (["--part", "peers", "--model-path", "MODEL"], "give --peer"),
    ],
)
def test_what_is_missing_is_named(arguments, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        run(*arguments, "--results", tmp_path, "--work", tmp_path)


def test_a_file_that_lacks_something_is_named(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text('title = "x"\ncommon = ""\n')
    with pytest.raises(ConfigError, match=r"broken.toml.*common_quick"):
        read_study(str(path))
