"""Charts of a comparison, drawn with matplotlib where it is installed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rag_radix.errors import ConfigError


def check_plottable() -> None:
    """Find out before a long measurement whether charts can be drawn.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("--report draws charts: pip install 'rag-radix[plot]'") from None


def draw(report: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Draw what there is; returns the files' names by what they show."""
    charts = {"Time to first token": _times, "Tokens found cached": _hit_rates}
    charts["Ratios with their confidence intervals"] = _ratios
    if report["throughput"] is not None:
        charts["Time to first token over rate"] = draw_over_rate
    names = {}
    for title, plot in charts.items():
        names[title] = f"{plot.__name__.removeprefix('draw_').strip('_')}.png"
        figure = plot(report)
        figure.savefig(folder / names[title], dpi=150)
    return names


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """Without pyplot, which keeps state and may want a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def _times(report: Mapping[str, Any]) -> Any:
    """Mean and 90th percentile, a group of bars for each load."""
    loads = report["loads"]
    arms = list(next(iter(loads.values())))
    figure, axis = _figure(2.5 + 1.5 * len(loads) * len(arms) / 3, 4)
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        places = [place + (number - (len(arms) - 1) / 2) * width for place in range(len(loads))]
        ttft = [by_arm[arm]["ttft_s"] for by_arm in loads.values()]
        axis.bar(places, [each["mean"] for each in ttft], width, label=arm)
        axis.plot(places, [each["p90"] for each in ttft], "k_", markersize=14)
    axis.set_xticks(range(len(loads)), [load.replace(", ", "\n") for load in loads])
    axis.set_ylabel("s, mean; dash: 90th percentile")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure


def percent(share: float | None) -> float:
    """What isn't known has no mark in a chart."""
    return math.nan if share is None else 100 * share


def _hit_rates(report: Mapping[str, Any]) -> Any:
    """Tokens by tier, of the last load; the bound counts tokens in documents alone."""
    by_arm = list(report["loads"].values())[-1]
    figure, axis = _figure(8, 1.6 + 0.45 * len(by_arm))
    device, host, documents = (
        [percent(figures[name]) for figures in by_arm.values()]
        for name in ("device_hit_rate", "host_hit_rate", "document_hit_rate")
    )
    axis.barh(list(by_arm), device, label="device")
    axis.barh(list(by_arm), host, left=device, label="host")
    axis.plot(documents, range(len(by_arm)), "k|", markersize=14, label="in documents")
    bound = 100 * report["bound"]["document_hit_rate"]
    axis.axvline(bound, color="black", linestyle="--", label="bound, in documents")
    axis.invert_yaxis()
    axis.set_xlabel("% of all tokens of the prompts")
    axis.set_xlim(left=0)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8)
    return figure


def _ratios(report: Mapping[str, Any]) -> Any:
    """Mean TTFT over the reference's, a point with its interval for each arm and load."""
    rows = [
        (f"{arm}\n{load}", by_arm[arm]["mean_ttft"])
        for load, by_arm in report["ratios"].items()
        for arm in by_arm
    ]
    figure, axis = _figure(9, 1.2 + 0.6 * len(rows))
    for place, (_, ratio) in enumerate(rows):
        low, high = (ratio[end] or ratio["value"] for end in ("low", "high"))
        axis.plot([low, high], [place, place], color="tab:gray")
        axis.plot(ratio["value"], place, "ko")
    axis.axvline(1, color="black", linestyle="--")
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axis.margins(y=0.5 / len(rows))
    axis.grid(axis="x", alpha=0.3)
    axis.invert_yaxis()
    axis.set_xlabel(f"mean TTFT over that of {report['reference']}; above 1, that is faster")
    return figure


def draw_over_rate(report: Mapping[str, Any]) -> Any:
    """Every rate of the throughput search, a line for each repeat."""
    figure, axis = _figure(7, 4.5)
    for number, (arm, found) in enumerate(report["throughput"]["own_limit"].items()):
        for repeat, points in enumerate(found["mean_ttft_s"]):
            label = arm if repeat == 0 else None
            axis.plot(*zip(*points, strict=True), f"C{number}o-", alpha=0.6, label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("requests/s")
    axis.set_ylabel("mean TTFT, s")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure
