"""Figures of a comparison: spreads of repeats, and what they were measured on."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, median and largest of some repeats."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Spread of `theirs / ours` over pairs taken one after the other."""
    return spread([b / a for a, b in zip(ours, theirs, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the nearest ranks, as numpy has it."""
    import numpy as np

    return float(np.percentile(np.asarray(values), percent))


def environment() -> dict[str, Any]:
    """Versions, hardware and the checkout's commit, for a report."""
    return {
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("sglang", "torch", "rag-radix")},
        },
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": _gpus(),
        },
    }


@functools.cache
def commit() -> str | None:
    """Of the checkout that this runs from, with a + if files differ from it; None for a wheel."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--short", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


_GPUS = """
import json, torch
found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps([{"name": each.name, "memory_bytes": each.total_memory} for each in found]))
"""


@functools.cache
def _gpus() -> list[dict[str, Any]]:
    """Name and memory of each that this process sees.

    Another process asks, as whoever asks holds memory of a GPU until it ends; none where torch is
    built without CUDA.
    """
    import torch

    if torch.version.cuda is None:
        return []
    asked = subprocess.run(
        [sys.executable, "-c", _GPUS], capture_output=True, text=True, check=True
    )
    gpus: list[dict[str, Any]] = json.loads(asked.stdout)
    return gpus


def hardware_words(hardware: Mapping[str, Any]) -> str:
    """A machine, from the `hardware` of `environment`."""
    words = f"{hardware['cores']} cores of {hardware['processor'] or 'an unnamed processor'}"
    words += f" with {hardware['memory_bytes'] / 2**30:.0f} GiB"
    # Results of earlier versions lack GPUs.
    kinds = Counter((gpu["name"], gpu["memory_bytes"]) for gpu in hardware.get("gpus", ()))
    for (name, memory_bytes), count in kinds.items():
        words += f", {count} × {name} with {memory_bytes / 2**30:.0f} GiB"
    return words


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
