"""Plugins of SGLang, which it loads in every one of its processes, to put faults into a server."""

from __future__ import annotations

from pathlib import Path


def environment_with(plugin: str, folder: Path) -> dict[str, str]:
    """Environment of a server that loads `plugin`, a module with a `register()`, made in
    `folder`."""
    info = folder / "faults-1.dist-info"
    info.mkdir(parents=True)
    (folder / "faults.py").write_text(plugin)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaults = faults:register\n")
    return {"PYTHONPATH": str(folder)}
