"""RESULTS.md: all that a study has measured, beside what the paper says.

Every number and every word that reads one comes from the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rag_radix_benchmarks.figures import hardware_words
from rag_radix_benchmarks.limits import memory_words
from rag_radix_benchmarks.readings import (
    MEANINGS,
    SchedulingBar,
    arms_of_other_prompts,
    reading,
    summary,
)
from rag_radix_benchmarks.study_changes import other_options
from rag_radix_benchmarks.study_charts import draw_part
from rag_radix_benchmarks.study_file import Part, Study
from rag_radix_benchmarks.study_results import Measured, Results
from rag_radix_benchmarks.study_tables import tables
from rag_radix_benchmarks.tables import markdown, ratio_text

PAPER = "[RAGCache](https://arxiv.org/abs/2404.12457)"
NOT_RUN = "not run"
COMMIT_DIGITS = 12


def write_report(study: Study, results: Results, path: Path) -> None:
    """Write the report, and its charts into a folder `results` beside it.

    Raises:
        ConfigError: A result can't be read.
    """
    charts = path.parent / "results"
    charts.mkdir(parents=True, exist_ok=True)
    measured = {name: results.of(part) for name, part in study.parts.items()}
    blocks = [f"# {study.title}", *_head(study)]
    header = ["part", "the paper", "here", "measured"]
    rows = [_row(part, measured[name]) for name, part in study.parts.items()]
    blocks.append(markdown(header, rows, align="---"))
    for name, part in study.parts.items():
        drawn = draw_part(part, measured[name], charts)
        blocks += _section(study, part, measured[name], [f"results/{each}" for each in drawn])
    path.write_text("\n\n".join(blocks) + "\n")


def _head(study: Study) -> Iterator[str]:
    meanings = "; ".join(f"*{word}*: {meaning}" for word, meaning in MEANINGS.items())
    yield (
        "Written by `rag-radix bench study --write`; nothing here is edited by hand. "
        f"The paper is {PAPER}: LLaMA2-7B and Mistral-7B on an A10G, larger models on H800s, "
        f"documents of Wikipedia; its baselines keep their caches in GPU memory alone. "
        f"{study.conditions}"
    )
    yield (
        "Ratios are the arm's time by the reference's, so above 1 the reference is faster; their "
        "interval is of 95% confidence over the repeats, each of its own seed. Read by the "
        f"interval of mean TTFT, the reference is: {meanings}. `of bound` is the part of the "
        "prefill time that a clairvoyant cache could save which an arm saves, by a model of that "
        "time; *prefill, modelled* is the arm's by the reference's, *at most* the arm's by the "
        "bound's, and *of what was left* the part that the reference saves of what the bound "
        "could still save the arm; it has no interval, and is above 1 where a queue in another "
        "order than the trace's saves more than the bound, which is of that order. MiB moved and "
        "tokens evicted are a request's."
    )


def _provenance(report: Mapping[str, Any]) -> str:
    """What a result was measured on and with."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    commits = report.get("commits") or [report["commit"]]
    short = ", ".join("unknown" if each is None else _short(each) for each in commits)
    return f"{hardware_words(report['hardware'])}; {versions}; commit {short}"


def _short(commit: str) -> str:
    """With the + of changed files."""
    return commit.rstrip("+")[:COMMIT_DIGITS] + "+" * commit.endswith("+")


def _row(part: Part, measured: Sequence[Measured]) -> list[str]:
    link = f"[{part.title}](#{_anchor(part.title)})"
    found = "<br>".join(_findings(part, measured)) or "-"
    return [link, part.paper, found, _extent(part, measured)]


def _anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -")
    return kept.replace(" ", "-")


def _extent(part: Part, measured: Sequence[Measured]) -> str:
    if not measured:
        return NOT_RUN
    quick = sum(each.quick for each in measured)
    missing = len(part.steps) - len(measured)
    words = ["in full" if not quick else "quick" if quick == len(measured) else "partly quick"]
    if any(other_options(part, each) for each in measured):
        words.append("with earlier options")
    if missing:
        words.append(f"{missing} of {len(part.steps)} steps {NOT_RUN}")
    return ", ".join(words)


def _findings(part: Part, measured: Sequence[Measured]) -> Iterator[str]:
    for each in measured:
        report = each.report
        if part.asks_for == "scheduling":
            yield from _scheduling(report)
        elif report["benchmark"] == "ab":
            yield from _compared(each.step.label, report)
        elif report["benchmark"] == "speculation":
            for case in report["cases"]:
                search, ttft = (
                    case["ratios"][name] for name in ("search_not_overlapped_s", "mean_ttft_s")
                )
                yield (
                    f"{case['search']}, load {case['load']:g}: search {ratio_text(search)}, TTFT "
                    f"{ratio_text(ttft)}, {reading(ttft)}"
                )
        elif report["benchmark"] == "host-memory":
            yield from _policies(report)


def _compared(label: str, report: Mapping[str, Any]) -> Iterator[str]:
    readings = []
    for load, by_arm in report["ratios"].items():
        share = load.split(" of ")[0] if "%" in load else load
        for arm, ratios in by_arm.items():
            ttft = ratios["mean_ttft"]
            readings.append(reading(ttft))
            if len(report["ratios"]) * len(by_arm) <= 6:
                yield f"{label}, {share}: `{arm}` {ratio_text(ttft)}, {readings[-1]}"
    if len(readings) > 6:
        yield f"{label}: {summary(readings)}"
    for limit, by_arm in (report["throughput"] or {}).items():
        for arm, found in (by_arm or {}).items():
            ratio = found["reference_by_this"]
            if ratio is not None and arm != report["reference"]:
                yield f"throughput ({limit.replace('_', ' ')}) by `{arm}`'s: {ratio_text(ratio)}"


def _scheduling(report: Mapping[str, Any]) -> Iterator[str]:
    """What choosing batches takes with each arm, by load."""
    for load, by_arm in report["loads"].items():
        times = [
            f"`{arm}` {1e3 * figures['scheduling_s']:.2f}"
            for arm, figures in by_arm.items()
            if figures["scheduling_s"] is not None
        ]
        if times:
            kept = len(SchedulingBar.of(by_arm).within)
            yield f"{load}: {', '.join(times)} ms; {kept} of {len(times)} keep the bar of 1 ms"


def _policies(report: Mapping[str, Any]) -> Iterator[str]:
    """The hits of the first policy named like the paper's by each other's, over the sizes."""
    sizes = [size["policies"] for size in report["sizes"]]
    for ours in (name for name in ("pgdsf", "pgdsf-plus") if name in sizes[0]):
        ranges = []
        for other in sizes[0]:
            if other in ("pgdsf", "pgdsf-plus"):
                continue
            ratios = [
                size[ours]["hit_rate"]["median"] / size[other]["hit_rate"]["median"]
                for size in sizes
            ]
            ranges.append(f"{min(ratios):.2f}–{max(ratios):.2f} of `{other}`")
        yield f"hits of `{ours}`: {', '.join(ranges)}"


def _section(
    study: Study, part: Part, measured: Sequence[Measured], charts: Sequence[str]
) -> Iterator[str]:
    yield f"## {part.title}"
    yield f"{part.question} The paper: {part.paper}"
    if not measured:
        yield f"**{NOT_RUN.capitalize()}**: `rag-radix bench study --part {part.name}`."
        return
    provenances = {_provenance(each.report) for each in measured}
    if len(provenances) == 1:
        yield f"Measured on {next(iter(provenances))}."
    for each in measured:
        if len(provenances) > 1:
            yield f"{each.step.label}: measured on {_provenance(each.report)}."
        if each.quick:
            yield f"*{each.step.label}: quick version, of fewer requests, loads or arms.*"
        if others := other_options(part, each):
            yield f"**{each.step.label}: measured with earlier options**: {'; '.join(others)}."
        for table in tables(part, each):
            yield f"{table.title}\n\n{markdown(table.header, table.rows)}"
        yield from _remarks(part, each)
        yield f"```\n{each.report['command']}\n```"
    missing = [step.label for step in part.steps if step not in [each.step for each in measured]]
    if missing:
        yield f"{NOT_RUN.capitalize()}: {', '.join(missing)}."
    for chart in charts:
        yield f"![{part.title}]({chart})"
    if part.reason is not None:
        yield f"Why: {part.reason.strip()}"


def _remarks(part: Part, measured: Measured) -> Iterator[str]:
    report = measured.report
    if report["benchmark"] != "ab":
        return
    bound = report["bound"]
    words = [
        f"The bound finds {bound['document_hit_rate']:.1%} of the tokens in documents and saves "
        f"{bound['saved_share']:.1%} of the prefill time."
    ]
    if "unlimited" in bound:  # results of earlier versions lack it
        words.append(memory_words(bound))
    other_prompts = arms_of_other_prompts(report)
    for arm, answers in report["answers"].items():
        if arm in other_prompts:
            words.append(f"`{arm}` has prompts, and so answers, of its own.")
        elif answers["compared"]:
            words.append(
                f"{answers['compared'] - answers['different']} of {answers['compared']} answers "
                f"of `{arm}` are those of `{report['reference']}`."
            )
    if part.asks_for == "scheduling":
        bars = {load: str(SchedulingBar.of(each)) for load, each in report["loads"].items()}
        words += [f"With {load} {bar}." for load, bar in bars.items() if bar]
    if not report["client_kept_up"]:
        words.append("The client didn't keep up: these times are partly its own.")
    yield " ".join(words)
