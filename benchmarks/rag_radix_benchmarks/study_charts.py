"""Charts of a study, one figure for each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rag_radix_benchmarks.charts import draw_over_rate, percent
from rag_radix_benchmarks.study_file import Part
from rag_radix_benchmarks.study_results import Measured

POINT_WIDTH = 0.7


def draw_part(part: Part, measured: Sequence[Measured], folder: Path) -> list[str]:
    """Draw what was measured of a part; returns the files' names."""
    figures: dict[str, Any] = {}
    by_bench: dict[str, list[Measured]] = {}
    for each in measured:
        by_bench.setdefault(each.report["benchmark"], []).append(each)
    if "ab" in by_bench:
        figures[part.name] = _comparison(by_bench["ab"])
        searched = [each for each in by_bench["ab"] if each.report["throughput"]]
        if searched:
            figures[f"{part.name}-over-rate"] = draw_over_rate(searched[0].report)
    if "host-memory" in by_bench:
        figures[part.name] = _host_memory(by_bench["host-memory"][0].report)
    if "speculation" in by_bench:
        figures[part.name] = _speculation(by_bench["speculation"][0].report)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=120)
    return [f"{name}.png" for name in figures]


def _axes(panels: int, width: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    axes = figure.subplots(1, panels)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    return figure, axes


def _comparison(measured: Sequence[Measured]) -> Any:
    """TTFT, its ratios and hit rates, by step and load."""
    points = [
        (_point(each, load, many=len(each.report["loads"]) > 1), each.report, load)
        for each in measured
        for load in each.report["loads"]
    ]
    arms = list(dict.fromkeys(arm for _, report, load in points for arm in report["loads"][load]))
    figure, (times, ratios, hits) = _axes(3, 12 + 0.4 * len(points))
    for number, arm in enumerate(arms):
        _plot_arm(arm, number, len(arms), points, times, ratios, hits)
    bounds = [100 * report["bound"]["document_hit_rate"] for _, report, _ in points]
    hits.plot(range(len(points)), bounds, "k_", markersize=24, label="bound, in documents")
    ratios.axhline(1, color="black", linestyle="--", linewidth=1)
    times.set_ylabel("TTFT, s: mean, and 90th percentile above it")
    ratios.set_ylabel("mean TTFT of the arm by that of the reference")
    hits.set_ylabel("% of all tokens of prompts, found in documents")
    for axis in (times, ratios, hits):
        axis.set_xticks(range(len(points)), [name for name, _, _ in points], fontsize=7)
        axis.margins(x=0.1)
    times.set_ylim(bottom=0)
    hits.set_ylim(bottom=0)
    figure.legend(*hits.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _plot_arm(
    arm: str,
    number: int,
    arms: int,
    points: Sequence[tuple[str, Mapping[str, Any], str]],
    times: Any,
    ratios: Any,
    hits: Any,
) -> None:
    color = f"C{number}"
    offset = (number - (arms - 1) / 2) * POINT_WIDTH / arms
    for place, (_, report, load) in enumerate(points):
        if arm not in report["loads"][load]:
            continue
        figures, at = report["loads"][load][arm], place + offset
        ttft = figures["ttft_s"]
        times.bar(at, ttft["mean"], POINT_WIDTH / arms, color=color)
        times.plot([at, at], [ttft["mean"], ttft["p90"]], color=color)
        hits.bar(
            at,
            percent(figures["document_hit_rate"]),
            POINT_WIDTH / arms,
            color=color,
            label=arm if place == 0 else None,
        )
        ratio = report["ratios"][load].get(arm, {}).get("mean_ttft")
        if ratio is not None:
            low, high = (ratio[end] or ratio["value"] for end in ("low", "high"))
            ratios.plot([at, at], [low, high], color=color)
            ratios.plot(at, ratio["value"], "o", color=color)


def _point(measured: Measured, load: str, many: bool) -> str:
    """A label for an axis: the step, and the load where there are several."""
    short = load.replace(" of the capacity of ", "\nof ").replace(", ", "\n")
    return f"{measured.step.label}\n{short}" if many else measured.step.label


def _host_memory(report: Mapping[str, Any]) -> Any:
    figure, (rates, shares) = _axes(2, 10)
    sizes = report["sizes"]
    percents = [size["host_percent"] for size in sizes]
    for policy in sizes[0]["policies"]:
        found = [size["policies"][policy] for size in sizes]
        hits = [100 * each["hit_rate"]["median"] for each in found]
        rates.plot(percents, hits, "o-", label=policy)
        shares.plot(percents, [each["share_of_bound"]["median"] for each in found], "o-")
    bound = [100 * size["bound_hit_rate"]["median"] for size in sizes]
    rates.plot(percents, bound, "k--", label="at most")
    rates.set_ylabel("% of all tokens of prompts, found in documents")
    shares.set_ylabel("part of the prefill time that can be saved")
    for axis in (rates, shares):
        axis.set_xlabel("host tier, % of the corpus")
    figure.legend(loc="outside upper center", ncols=6)
    return figure


def _speculation(report: Mapping[str, Any]) -> Any:
    figure, axes = _axes(2, 10)
    names = [f"{c['search']}\n{c['fraction']:.0%}\nload {c['load']:g}" for c in report["cases"]]
    titles = {"search_not_overlapped_s": "search not overlapped", "mean_ttft_s": "mean TTFT"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        ratios = [case["ratios"][name] for case in report["cases"]]
        values = [each["value"] for each in ratios]
        errors = [
            [abs((each[end] or each["value"]) - each["value"]) for each in ratios]
            for end in ("low", "high")
        ]
        axis.bar(range(len(names)), values, yerr=errors, capsize=3)
        axis.axhline(1, color="black", linestyle="--", linewidth=1)
        axis.set_xticks(range(len(names)), names, fontsize=7)
        axis.set_ylabel(f"{title}: without ÷ with speculation")
    return figure
