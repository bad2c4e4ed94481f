"""A profile as a picture."""

from __future__ import annotations

from pathlib import Path

from rag_radix.errors import ConfigError
from rag_radix.profile.file import Profile


def check_plotting() -> None:
    """Fail before the measurement rather than after it.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error


def save_plot(profile: Profile, path: str | Path) -> None:
    """Draw cold, device-hit and host-hit prefill over the length of the prefix, as PNG.

    Raises:
        ConfigError: The file can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in ("cold", "device", "host"):
        times = [(hit.cached_tokens, getattr(hit, name)) for hit in profile.hits]
        drawn = [(length, spread.median_s) for length, spread in times if spread is not None]
        if drawn:
            label = name if name == "cold" else f"{name} hit"
            axes.plot(*zip(*drawn, strict=True), marker="o", label=label)
    axes.set(
        yscale="log",
        xlabel=f"prefix tokens, followed by {profile.rest_tokens} new ones",
        ylabel="prefill seconds",
        title=f"{Path(profile.conditions.model).name} on {profile.conditions.device}",
    )
    lengths = [hit.cached_tokens for hit in profile.hits]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels=[f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(f"the plot can't be written to {str(path)!r}: {error}") from error
