"""A real corpus that every machine has: Python's language reference, indexed on first use."""

from __future__ import annotations

from pathlib import Path

from rag_radix_frontend import build_index

from rag_radix_benchmarks.python_questions import write_reference

REFERENCE = "python-reference"
KIND = "ivf"
"""In clusters, so that a search has stages; by default all of them are visited."""


def reference_index(folder: Path = Path(".cache/bench")) -> Path:
    """The index, built where it doesn't exist yet; that takes a minute.

    Raises:
        FrontendError: The encoder isn't installed.
    """
    index = folder / REFERENCE
    if not index.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / f"{REFERENCE}.jsonl"
        write_reference(source)
        build_index(source, index, kind=KIND)
    return index
