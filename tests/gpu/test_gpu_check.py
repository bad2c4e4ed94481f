"""`scripts/gpu_check` on whatever device this machine has."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_levels_and_page_copies_are_right_on_this_device() -> None:
    result = run("--device", DEVICE, "--repeats", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["passed"]
    checks = {check["check"] for check in report["checks"]}
    assert checks >= {"decode grouped", "extend grouped", "page copy"}
    assert any(check.get("levels", 0) > 1 for check in report["checks"])
    assert all(timed["ratio"] > 0 for timed in report["times"])


def test_a_machine_without_a_gpu_is_told_so() -> None:
    result = run(CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "no CUDA device" in result.stdout
