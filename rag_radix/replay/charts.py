"""Charts of replays, drawn with matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_radix.errors import ConfigError

if TYPE_CHECKING:
    from rag_radix.replay.simulate import PolicyResult


def check_plottable(path: Path) -> None:
    """Find out before a long replay whether a chart can be written to `path`.

    Raises:
        ConfigError: matplotlib isn't installed, or doesn't write such files.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib: pip install 'rag-radix[plots]', or leave --plot out"
        ) from None
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
