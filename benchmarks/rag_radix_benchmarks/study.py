"""`rag-radix bench study`: everything that RESULTS.md says, part by part.

A study is a file with the sizes, loads and seeds of all its parts (`--study`: one that comes along
or a .toml file). `--list` shows the parts with
their minutes as estimated and as measured, `--part` measures some, one after the other, and
keeps their figures in `--results`; runs that are done are kept in `--work`, so that an interrupted
part goes on. `--write FILE` makes one report of all results that there are; it says which parts
weren't measured, and which only in the `--quick` version: fewer arms, loads and requests.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rag_radix.errors import ConfigError
from rag_radix_benchmarks.ab_options import Plan
from rag_radix_benchmarks.charts import check_plottable
from rag_radix_benchmarks.command import benchmark
from rag_radix_benchmarks.progress import progress
from rag_radix_benchmarks.study_estimate import comparison_minutes
from rag_radix_benchmarks.study_file import Part, Step, Study, read_study
from rag_radix_benchmarks.study_report import write_report
from rag_radix_benchmarks.study_results import Measured, Results
from rag_radix_benchmarks.study_tables import tables
from rag_radix_benchmarks.tables import plain

# Benchmarks that need no model.
REPLAYED = ("host-memory",)
MODEL = "MODEL"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rag-radix bench study`."""
    parser.add_argument("--study", default="cpu", metavar="NAME", help="or a .toml file")
    parser.add_argument("--model-path", metavar="MODEL", help="where the study names none")
    parser.add_argument("--part", nargs="+", default=[], metavar="NAME", help="to be measured")
    parser.add_argument("--list", action="store_true", help="show the parts and their minutes")
    parser.add_argument("--quick", action="store_true", help="the small version of these parts")
    parser.add_argument("--peer", metavar="URL", help="of a server for arms `openai:…@PEER`")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmarks/results"),
        metavar="DIR",
        help="figures of each part as JSON",
    )
    parser.add_argument(
        "--work", type=Path, default=Path(".cache/study"), metavar="DIR", help="finished runs"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="the report, with its charts")
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="that win over the file's")


def run(options: argparse.Namespace) -> None:
    """List, measure, write."""
    study = read_study(options.study)
    asked = [study.part(name) for name in options.part]
    if options.write is not None:
        check_plottable()
    results = Results(options.results)
    if options.list:
        print(plain(["part", "minutes", "quick", "measured"], _listed(study, results, options)))
    for part in asked:
        for step in part.steps_of(options.quick):
            progress(f"{part.name}, {step.label}")
            report = _measured(part, step, options)
            results.put(part, step, options.quick, report)
            for table in tables(part, Measured(step, report, options.quick)):
                print(f"{table.title}\n{plain(table.header, table.rows)}\n")
    if options.write is not None:
        write_report(study, results, options.write)
        progress(f"{options.write} is written")


def _measured(part: Part, step: Step, options: argparse.Namespace) -> dict[str, Any]:
    module = benchmark(step.bench)
    version = "quick" if options.quick else "full"
    arguments = _arguments(part, step, options)
    folder = options.work / f"{part.name}-{step.name}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    resumed = any(path.stat().st_size for path in folder.glob("*.jsonl"))
    started = time.monotonic()
    report: dict[str, Any] = module.measure(_parsed(step, ["--out", str(folder), *arguments]))
    return {
        **report,
        "command": _printable(step, arguments, report["config"].get("model_path")),
        # Of this process alone: what was done before isn't in the seconds of one that goes on.
        "wall": {"seconds": time.monotonic() - started, "resumed": resumed},
    }


def _arguments(part: Part, step: Step, options: argparse.Namespace) -> list[str]:
    """All that the step's benchmark is given."""
    arguments = step.arguments(options.quick, options.options)
    if step.bench not in REPLAYED and "--model-path" not in arguments:
        if options.model_path is None:
            raise ConfigError(f"part {part.name!r} asks a model: give --model-path")
        arguments = ["--model-path", options.model_path, *arguments]
    if any("@PEER" in each for each in arguments):
        if options.peer is None:
            raise ConfigError(
                f"part {part.name!r} has an arm that is served elsewhere: start it and give --peer"
            )
        arguments = [each.replace("@PEER", f"@{options.peer}") for each in arguments]
    return [*arguments, *(("--", *part.server_flags) if part.server_flags else ())]


def _parsed(step: Step, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(f"rag-radix bench {step.bench}")
    benchmark(step.bench).add_options(parser)
    return parser.parse_args(arguments)


def _printable(step: Step, arguments: Sequence[str], model_path: str | None) -> str:
    """The command, with the model's name instead of a folder of this machine."""
    named = [MODEL if each == model_path else each for each in arguments]
    return shlex.join(["rag-radix", "bench", step.bench, *named])


def _listed(study: Study, results: Results, options: argparse.Namespace) -> list[list[str]]:
    width = max(map(len, study.parts))
    return [
        [
            f"{name:<{width}}  {part.title}",
            *(_minutes(study, part, quick, options) for quick in (False, True)),
            _measured_minutes(results.of(part)),
        ]
        for name, part in study.parts.items()
    ]


def _measured_minutes(measured: Sequence[Measured]) -> str:
    """What the results took, with a + where a part of it was done before or isn't known."""
    walls = [each.report.get("wall") for each in measured]
    known = [wall for wall in walls if wall is not None]
    if not known:
        return "-"
    more = "+" if len(known) < len(walls) or any(wall["resumed"] for wall in known) else ""
    quick = " quick" if any(each.quick for each in measured) else ""
    return f"{sum(wall['seconds'] for wall in known) / 60:.0f}{more}{quick}"


def _minutes(study: Study, part: Part, quick: bool, options: argparse.Namespace) -> str:
    stated = argparse.Namespace(
        **{**vars(options), "quick": quick, "peer": options.peer or "http://HOST"},
    )
    stated.model_path = options.model_path or MODEL
    steps = part.steps_of(quick)
    if not steps:
        return "-"
    return f"{sum(_step_minutes(study, part, step, stated) for step in steps):.0f}"


def _step_minutes(study: Study, part: Part, step: Step, options: argparse.Namespace) -> float:
    if step.minutes is not None:
        return step.minutes[options.quick]
    parsed = _parsed(step, _arguments(part, step, options))
    return comparison_minutes(Plan.of(parsed), parsed.throughput, study.machine)
