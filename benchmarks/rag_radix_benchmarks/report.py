"""A comparison's report: its sections, for a terminal and as Markdown with charts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_radix_benchmarks.charts import draw
from rag_radix_benchmarks.figures import hardware_words
from rag_radix_benchmarks.limits import memory_words
from rag_radix_benchmarks.readings import SchedulingBar, arms_of_other_prompts
from rag_radix_benchmarks.tables import (
    CACHE,
    RATIOS,
    THROUGHPUT,
    TIMES,
    Rows,
    cache_rows,
    markdown,
    plain,
    ratio_rows,
    throughput_rows,
    time_rows,
    without_empty,
)

_LIMITS = {
    "own_limit": "its own TTFT at the lowest rate",
    "common_limit": "the TTFT of no-cache at the lowest rate",
}


@dataclass(frozen=True)
class Section:
    """A table under a title."""

    title: str
    header: list[str]
    rows: Rows


def sections(report: Mapping[str, Any]) -> Iterator[Section]:
    """The tables of a report."""
    for load, by_arm in report["loads"].items():
        yield Section(f"Times at {load}", *without_empty(TIMES, time_rows(by_arm)))
        title = f"Ratios to {report['reference']} at {load}; above 1, that is faster"
        requests = by_arm[report["reference"]]["requests"] / report["config"]["repeats"]
        rows = ratio_rows(report["ratios"][load], requests)
        yield Section(title, *without_empty(RATIOS, rows))
        yield Section(f"Cache at {load}", *without_empty(CACHE, cache_rows(by_arm)))
    for limit, by_arm in (report["throughput"] or {}).items():
        if by_arm is not None:
            title = f"Throughput: highest rate with a mean TTFT under 5 times {_LIMITS[limit]}"
            yield Section(title, THROUGHPUT, throughput_rows(by_arm))


def remarks(report: Mapping[str, Any]) -> Iterator[str]:
    """What has to be said beside the tables, a sentence or two each."""
    bound = report["bound"]
    yield (
        "No cache of this size, serving in this order, finds more than "
        f"{bound['document_hit_rate']:.1%} of the tokens in documents, or saves more than "
        f"{bound['saved_share']:.1%} of the prefill time. `of bound` is an arm's part of that."
    )
    yield memory_words(bound)
    for load, by_arm in report["loads"].items():
        if bar := str(SchedulingBar.of(by_arm)):
            yield f"At {load} {bar}."
    other_prompts = arms_of_other_prompts(report)
    for arm, answers in report["answers"].items():
        if arm in other_prompts:
            yield f"{arm} has prompts, and so answers, of its own."
            continue
        yield (
            f"{answers['different']} of {answers['compared']} answers of {arm} differ from those "
            f"of {report['reference']}, {answers['first_tokens_different']} in the first token."
        )
    if len(report["commits"]) > 1:
        yield f"These are runs of several commits: {', '.join(map(str, report['commits']))}."
    if not report["client_kept_up"]:
        yield "The client didn't keep up: these times are partly its own."


def as_text(report: Mapping[str, Any]) -> str:
    """For a terminal."""
    tables = [f"{each.title}\n{plain(each.header, each.rows)}" for each in sections(report)]
    return "\n\n".join([*tables, *remarks(report)])


def as_markdown(report: Mapping[str, Any], charts: Mapping[str, str]) -> str:
    """For a file.

    Args:
        report: The report.
        charts: Files beside it, by what they show.
    """
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    parts = [
        "# A/B comparison",
        f"`{report['config']['model_path']}` on {hardware_words(report['hardware'])}; {versions}; "
        "commit "
        f"{', '.join(each or 'unknown' for each in report['commits'])}. Times are seconds, over "
        f"{report['config']['repeats']} repeats; intervals are of 95% confidence.",
        f"```\nrag-radix {' '.join(map(shlex.quote, report['command']))}\n```",
    ]
    parts += [f"## {each.title}\n\n{markdown(each.header, each.rows)}" for each in sections(report)]
    parts += ["## Remarks", *remarks(report)]
    parts += [f"## {title}\n\n![{title}]({file})" for title, file in charts.items()]
    flags = "\n".join(
        f"{arm:<24} {' '.join(of_arm)}" for arm, of_arm in report["config"]["flags"].items()
    )
    built = {arm: facts["built"] for arm, facts in report["servers"].items()}
    parts += [
        f"## Servers\n\n```\n{flags}\n```",
        f"What they say of themselves:\n\n```json\n{json.dumps(built, indent=1)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def write(report: Mapping[str, Any], folder: Path) -> None:
    """Write `report.md`, `report.json` and charts into a folder."""
    charts = draw(report, folder)
    (folder / "report.md").write_text(as_markdown(report, charts))
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
