"""A study's measurements as rows of tables, benchmark by benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rag_radix_benchmarks import host_memory
from rag_radix_benchmarks.readings import (
    arms_of_other_prompts,
    never_worse,
    prefill_ratios,
    reading,
)
from rag_radix_benchmarks.statistics import paired_ratio
from rag_radix_benchmarks.study_file import Part
from rag_radix_benchmarks.study_results import Measured
from rag_radix_benchmarks.tables import (
    THROUGHPUT,
    evicted_text,
    ratio_text,
    throughput_rows,
    without_empty,
)

ARMS = [
    *("arm", "TTFT mean, s", "p90", "tokens found", "documents found", "of bound"),
    *("MiB out", "MiB in", "evicted, device", "evicted, host"),
    *("scheduling, ms", "search not overlapped, ms"),
]
RATIOS = [
    *("arm ÷ reference", "mean TTFT", "reference is", "p90 TTFT"),
    *("prefill, modelled", "at most", "of what was left"),
]
LADDER = ["step", "mean TTFT before ÷ after", "after it is"]
SPECULATION = [
    *("search, part of index, load", "not overlapped, off → on, ms", "off ÷ on"),
    *("TTFT, off → on, s", "off ÷ on", "with it is", "kept", "same answers"),
]


@dataclass(frozen=True)
class Table:
    """A table with a line of its own above it."""

    title: str
    header: list[str]
    rows: list[list[str]]


def tables(part: Part, measured: Measured) -> Iterator[Table]:
    """All tables of a step of a part."""
    report = measured.report
    if report["benchmark"] == "ab":
        yield from _comparison(measured.step.label, report)
        yield from _ladder(part.ladder, report)
    elif report["benchmark"] == "host-memory":
        title = f"{measured.step.label}: hit rate and, in brackets, the share of the bound"
        yield Table(title, *host_memory.table(dict(report)))
    elif report["benchmark"] == "speculation":
        title = f"{measured.step.label}: medians of the repeats, ratios over all of them"
        yield Table(title, SPECULATION, [_case(each) for each in report["cases"]])


def _comparison(label: str, report: Mapping[str, Any]) -> Iterator[Table]:
    reference, saved_share = report["reference"], report["bound"]["saved_share"]
    for load, by_arm in report["loads"].items():
        title = f"{label}: {load}"
        yield _without_empty(Table(title, ARMS, [_arm(*each) for each in by_arm.items()]))
        rows = [
            _ratio(arm, ratios, prefill_ratios(by_arm[arm], by_arm[reference], saved_share))
            for arm, ratios in report["ratios"][load].items()
        ]
        yield _without_empty(Table(f"Ratios to `{reference}` at the same load", RATIOS, rows))
    for limit, found in (report["throughput"] or {}).items():
        if found is not None:
            of = "its own" if limit == "own_limit" else "no-cache's"
            title = f"Highest rate whose mean TTFT stays under five times {of} at the lowest rate"
            yield Table(title, THROUGHPUT, throughput_rows(found))


def _ladder(ladder: Sequence[str], report: Mapping[str, Any]) -> Iterator[Table]:
    """What each step of a ladder gains, and apart from it what other prompts do."""
    if not ladder:
        return
    other_prompts = arms_of_other_prompts(report)
    for load, by_arm in report["loads"].items():
        climbed = [arm for arm in ladder if arm in by_arm and arm not in other_prompts]
        # Results of earlier versions lack the figures of each repeat.
        if not climbed or "mean_ttft_of_repeats_s" not in by_arm[climbed[0]]:
            continue
        steps = list(pairwise(climbed))
        if len(steps) > 1:
            steps.append((climbed[0], climbed[-1]))
        yield Table(f"Step by step: {load}", LADDER, [_gain(by_arm, *step) for step in steps])
        apart = [(climbed[-1], arm) for arm in other_prompts if arm in by_arm]
        if apart:
            title = (
                f"Apart, as the documents' order makes other prompts, with other answers: {load}"
            )
            yield Table(title, LADDER, [_gain(by_arm, *step) for step in apart])


def _gain(by_arm: Mapping[str, Any], before: str, after: str) -> list[str]:
    times = (by_arm[arm]["mean_ttft_of_repeats_s"] for arm in (before, after))
    ratio = asdict(paired_ratio(*times))
    return [f"`{before}` → `{after}`", ratio_text(ratio), reading(ratio)]


def _arm(arm: str, figures: Mapping[str, Any]) -> list[str]:
    moved = figures["moved_bytes"]
    search_s = figures.get("search_not_overlapped_s")
    return [
        f"`{arm}`",
        f"{figures['ttft_s']['mean']:.3f}",
        f"{figures['ttft_s']['p90']:.3f}",
        _text(figures["token_hit_rate"], "{:.1%}"),
        _text(figures["hit_documents"], "{:.1%}"),
        _text(figures["share_of_bound"], "{:.2f}"),
        _text(moved and moved["out"], "{:.2f}", 2**-20),
        _text(moved and moved["in"], "{:.2f}", 2**-20),
        *(evicted_text(figures, tier) for tier in ("device", "host")),
        _text(figures["scheduling_s"], "{:.2f}", 1e3),
        _text(search_s, "{:.1f}", 1e3),
    ]


def _ratio(arm: str, ratios: Mapping[str, Any], prefill: Mapping[str, float] | None) -> list[str]:
    ttft = ratios["mean_ttft"]
    modelled = prefill or {}
    reads = reading(ttft) + ("" if never_worse(ttft) else " (below 0.97)")
    return [
        f"`{arm}`",
        ratio_text(ttft),
        reads,
        ratio_text(ratios["p90_ttft"]),
        *(_text(modelled.get(name), "{:.2f}") for name in ("reached", "possible", "of_rest")),
    ]


def _case(case: Mapping[str, Any]) -> list[str]:
    on, off, ratios = case["arms"]["on"], case["arms"]["off"], case["ratios"]
    answers = case["answers"]
    search = "search_not_overlapped_s"
    return [
        f"{case['search']}, {case['fraction']:.1%}, {case['load']:g}",
        f"{off[search]['median'] * 1e3:.1f} → {on[search]['median'] * 1e3:.1f}",
        ratio_text(ratios[search]),
        f"{off['mean_ttft_s']['median']:.3f} → {on['mean_ttft_s']['median']:.3f}",
        ratio_text(ratios["mean_ttft_s"]),
        reading(ratios["mean_ttft_s"]),
        f"{on['kept']['median']:.0%}",
        f"{answers['compared'] - answers['different']} of {answers['compared']}",
    ]


def _text(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else form.format(value * unit)


def _without_empty(table: Table) -> Table:
    return Table(table.title, *without_empty(table.header, table.rows))
