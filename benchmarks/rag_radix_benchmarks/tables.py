"""A comparison as tables, for a terminal or in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Rows = list[list[str]]

TIMES = [
    *("arm", "TTFT mean, s", "p50", "p90", "p99"),
    *("TPOT, ms", "latency, s", "requests/s", "scheduling, ms", "search, ms"),
]
CACHE = [
    *("arm", "tokens found", "on device", "on host", "in documents", "documents found"),
    *("recomputed", "of bound", "MiB out", "MiB in", "evicted, device", "evicted, host"),
]
THROUGHPUT = ["arm", "requests/s", "limit s", "reference ÷ arm"]
RATIOS = ["arm ÷ reference", "mean TTFT", "p50", "p90", "p99", "mean latency"]


# Of fewer requests, this percentile is their maximum.
P99_REQUESTS = 100


def time_rows(by_arm: Mapping[str, Any]) -> Rows:
    """One row an arm, in the columns of `TIMES`.

    The 99th percentile is left out of few requests. Scheduling is CPU time a request, search what
    of it is not overlapped with generation.
    """
    rows = []
    for arm, figures in by_arm.items():
        ttft, tpot = figures["ttft_s"], figures["tpot_s"]
        rows.append(
            [
                arm,
                *(f"{ttft[name]:.3f}" for name in ("mean", "p50", "p90")),
                f"{ttft['p99']:.3f}" if figures["requests"] >= P99_REQUESTS else "-",
                _text(tpot and tpot["mean"], "{:.0f}", 1e3),
                f"{figures['latency_s']['mean']:.3f}",
                f"{figures['requests_per_s']:.2f}",
                _text(figures["scheduling_s"], "{:.1f}", 1e3),
                _text(figures["search_not_overlapped_s"], "{:.1f}", 1e3),
            ]
        )
    return rows


def cache_rows(by_arm: Mapping[str, Any]) -> Rows:
    """One row an arm, in the columns of `CACHE`.

    The first four rates are of all tokens of the prompts, `documents found` of all documents, as
    a whole; tokens computed again, bytes moved and tokens evicted are a request's.
    """
    return [
        [
            arm,
            *(_text(figures[name], "{:.1%}") for name in _RATES),
            _text(figures["recomputed_tokens"], "{:,.0f}"),
            _text(figures["share_of_bound"], "{:.2f}"),
            *(
                _text(figures["moved_bytes"] and figures["moved_bytes"][way], "{:.2f}", 2**-20)
                for way in ("out", "in")
            ),
            *(evicted_text(figures, tier) for tier in ("device", "host")),
        ]
        for arm, figures in by_arm.items()
    ]


_RATES = (
    *("token_hit_rate", "device_hit_rate", "host_hit_rate"),
    *("document_hit_rate", "hit_documents"),
)


def _text(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else form.format(value * unit)


def evicted_text(figures: Mapping[str, Any], tier: str) -> str:
    """Tokens a request that left a tier; "-" where they weren't counted."""
    # Results of earlier versions lack it.
    evicted = figures.get("evicted_tokens") or {}
    return _text(evicted.get(tier), "{:,.0f}")


def throughput_rows(by_arm: Mapping[str, Any]) -> Rows:
    """One row an arm, in the columns of `THROUGHPUT`: medians over the repeats."""
    rows = []
    for arm, found in by_arm.items():
        rates = [rate for rate in found["requests_per_s"] if rate is not None]
        ratio = found["reference_by_this"]
        rows.append(
            [
                arm,
                f"{statistics.median(rates):.3g}" if rates else "-",
                f"{statistics.median(found['limit_s']):.3g}",
                "-" if ratio is None else ratio_text(ratio),
            ]
        )
    return rows


def ratio_rows(by_arm: Mapping[str, Any], requests: float) -> Rows:
    """One row an arm, in the columns of `RATIOS`: ratio and its confidence interval.

    Args:
        by_arm: Ratios of the arms.
        requests: Of a run, whose figures they are of.
    """
    return [
        [
            arm,
            *(
                "-" if name == "p99_ttft" and requests < P99_REQUESTS else ratio_text(ratio)
                for name, ratio in ratios.items()
            ),
        ]
        for arm, ratios in by_arm.items()
    ]


def ratio_text(ratio: Mapping[str, Any]) -> str:
    if ratio["low"] is None:
        return f"{ratio['value']:.2f}"
    return f"{ratio['value']:.2f} ({ratio['low']:.2f}..{ratio['high']:.2f})"


def without_empty(header: Sequence[str], rows: Rows) -> tuple[list[str], Rows]:
    """Header and rows without columns that say nothing of any row."""
    says = [{row[column] for row in rows} != {"-"} for column in range(len(header))]
    kept = [column for column, something in enumerate(says) if something]
    return [header[each] for each in kept], [[row[each] for each in kept] for row in rows]


def plain(header: Sequence[str], rows: Rows) -> str:
    """Columns of a terminal: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    )


def markdown(header: Sequence[str], rows: Rows, align: str = "---:") -> str:
    """A table of Markdown, its first column to the left and the others as `align` says."""
    separator = ["---", *[align] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, separator, *rows))
