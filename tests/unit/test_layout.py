"""The repository's shape: what may be imported from where, and what must not be in any file."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "rag_radix": ROOT / "rag_radix",
    "rag_radix_frontend": ROOT / "frontend" / "rag_radix_frontend",
    "rag_radix_kernels": ROOT / "kernels" / "rag_radix_kernels",
    "rag_radix_benchmarks": ROOT / "benchmarks" / "rag_radix_benchmarks",
}
HEAVY_MODULES = ("torch", "sglang", "faiss", "transformers", "sentence_transformers", "triton")
ENTRY_POINT_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms", "console_scripts")


@pytest.mark.parametrize("folder", ["frontend", "kernels", "scripts", "tests", "benchmarks"])
def test_plain_folders_are_not_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_kernels_resolves_outside_the_checkout() -> None:
    # transformers imports a package of that name; ours must not shadow it.
    spec = importlib.util.find_spec("kernels")
    assert spec is not None
    assert spec.origin is not None
    assert not Path(spec.origin).is_relative_to(ROOT / "kernels")


@pytest.mark.parametrize("name", PACKAGES)
def test_package_resolves_to_its_folder_and_is_typed(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).parent == PACKAGES[name]
    assert (PACKAGES[name] / "py.typed").is_file()


@pytest.mark.parametrize("name", PACKAGES)
def test_importing_a_package_imports_no_heavy_module(name: str) -> None:
    code = (
        f"import sys; before = set(sys.modules); import {name}; "
        f"print(*sorted(set({HEAVY_MODULES!r}) & (set(sys.modules) - before)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def our_entry_points() -> list[importlib.metadata.EntryPoint]:
    points = importlib.metadata.distribution("rag-radix").entry_points
    return [point for point in points if point.group in ENTRY_POINT_GROUPS]


def test_every_entry_point_group_is_declared() -> None:
    assert {point.group for point in our_entry_points()} == set(ENTRY_POINT_GROUPS)


@pytest.mark.parametrize("point", our_entry_points(), ids=lambda point: point.group)
def test_entry_point_resolves_to_a_callable(point: importlib.metadata.EntryPoint) -> None:
    assert callable(point.load())


def test_kernels_and_frontend_import_nothing_of_the_plugin() -> None:
    ours = re.compile(r"^\s*(?:from|import) rag_radix(?:\.|\s|$)", re.MULTILINE)
    offenders = [
        str(file.relative_to(ROOT))
        for name in ("rag_radix_frontend", "rag_radix_kernels")
        for file in sorted(PACKAGES[name].rglob("*.py"))
        if ours.search(file.read_text())
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("a home or work folder", r"(^|[^A-Za-z0-9_.])/(root|home|work|Users)/[A-Za-z0-9_.-]+/"),
        ("a package registry host", r"(index-url|extra-index-url|find-links|\[\[?tool\.uv\.index)"),
        ("a mirror", r"https?://[^ ]*(pypi|/simple)[^ ]*"),
    ],
)
def test_no_tracked_file_names(what: str, pattern: str) -> None:
    listing = subprocess.run(
        ["git", "grep", "-nIE", pattern, "--", ".", ":!tests/unit/test_layout.py", ":!LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 128:
        pytest.skip("not a git checkout")
    assert listing.stdout == "", f"found {what}:\n{listing.stdout}"
