"""Charts of replays, drawn with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_radix.errors import ConfigError

if TYPE_CHECKING:
    from rag_radix.replay.plan import PlanCell
    from rag_radix.replay.runs import ReplayServer
    from rag_radix.replay.simulate import PolicyResult
    from rag_radix.replay.skew import Skew


def check_plottable(path: Path) -> None:
    """Find out before a long replay whether a chart can be written to `path`.

    Raises:
        ConfigError: matplotlib isn't installed, or doesn't write such files.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise ConfigError(
            f"--plot {str(path)!r}: use one of the endings {', '.join(sorted(formats))}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {str(path)!r}: there is no folder {str(path.parent)!r}")


def plot_policies(results: dict[str, PolicyResult], path: Path) -> None:
    """Bars for hit rate, share of the bound's saving and bytes to host, by policy."""
    figure, axes = _figure(1, 3, width=12, height=1.2 + 0.45 * len(results))
    labels = list(results)
    panels = (
        ("token hit rate, %", "{:.1f}", [100 * each.token_hit_rate for each in results.values()]),
        ("of the bound's time saving", "{:.3f}", [each.bound_share for each in results.values()]),
        ("to host, GiB", "{:,.0f}", [each.d2h_bytes / 2**30 for each in results.values()]),
    )
    for axis, (title, number, values) in zip(axes, panels, strict=True):
        bars = axis.barh(labels, values)
        axis.bar_label(bars, fmt=number, padding=3)
        axis.set_title(title)
        axis.margins(x=0.18)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].axvline(
        100 * next(iter(results.values())).bound_hit_rate, color="black", linestyle="--"
    )
    for axis in axes[1:]:
        axis.set_yticklabels([])
    figure.savefig(path, dpi=150)


def _figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    """Without pyplot, which keeps state and may want a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns)


def plot_plan(
    cells: Sequence[PlanCell], knee: PlanCell, skew: Skew, server: ReplayServer, path: Path
) -> None:
    """Hit rate and saved prefill time over host memory, a line for each GPU size, and the
    trace's skew."""
    figure, (rates, savings, shares) = _figure(1, 3, width=15, height=4.5)
    gib = server.kv_bytes_per_token / 2**30
    for device_tokens in sorted({cell.device_tokens for cell in cells}):
        row = [cell for cell in cells if cell.device_tokens == device_tokens]
        host = [cell.host_tokens * gib for cell in row]
        label = f"GPU {device_tokens:,} tokens"
        rates.plot(host, [100 * cell.token_hit_rate for cell in row], marker="o", label=label)
        savings.plot(host, [100 * cell.saved_share for cell in row], marker="o", label=label)
    savings.plot(knee.host_tokens * gib, 100 * knee.saved_share, "k*", markersize=15, label="knee")
    rates.plot(knee.host_tokens * gib, 100 * knee.token_hit_rate, "k*", markersize=15)
    sizes = sorted({cell.host_tokens * gib for cell in cells} - {0})
    titles = ("token hit rate of documents, %", "prefill time saved, %")
    for axis, title in zip((rates, savings), titles, strict=True):
        axis.set_title(title)
        axis.set_xlabel("host memory, GiB")
        axis.set_ylim(bottom=0)
        axis.minorticks_off()
        if len(sizes) > 1:
            # Sizes are tried in steps by a factor; 0 has no place on a logarithm's axis.
            axis.set_xscale("symlog", linthresh=sizes[0])
        axis.set_xticks([0, *sizes], [f"{size:,.3g}" for size in (0, *sizes)])
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    savings.legend()
    parts, retrievals = skew.curve()
    shares.plot([100 * part for part in parts], [100 * share for share in retrievals])
    for part in (0.03, 0.10, 0.20):
        share = 100 * skew.share_of_top(part)
        shares.plot(100 * part, share, "ko")
        shares.annotate(f"top {part:.0%}: {share:.0f}%", (100 * part + 2, share - 3))
    shares.set_title("skew: retrievals by documents, %")
    shares.set_xlabel("documents, most retrieved first, %")
    shares.set_ylim(0, 102)
    shares.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
