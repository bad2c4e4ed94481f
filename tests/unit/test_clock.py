"""A wall clock that jumps changes nothing: nobody asks it for more than a date."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("rag_radix", "frontend/rag_radix_frontend", "kernels/rag_radix_kernels")
WALL_CLOCK = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
}
# What is said of a date, and the age of files, which the system stamps by that clock.
ALLOWED = {"rag_radix/profile/file.py", "rag_radix/storage/segment.py"}


def readings(source: str) -> list[int]:
    """Lines on which a wall clock is read, under whatever names it was imported."""
    tree = ast.parse(source)
    names = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = names.get(node.value.id, (None, node.value.id))[1]
            if (owner, node.attr) in WALL_CLOCK:
                found.append(node.lineno)
        elif isinstance(node, ast.Name) and names.get(node.id) in WALL_CLOCK:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "from time import time\ntime()",
        "from time import time as now\nnow()",
        "from datetime import datetime\ndatetime.now()",
        "import time\nclock = time.time",
    ],
)
def test_a_reading_of_the_wall_clock_is_found(source: str) -> None:
    assert readings(source) == [2]


def test_no_decision_of_a_server_or_a_client_depends_on_the_wall_clock() -> None:
    asking = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if readings(path.read_text())
    }
    assert asking <= ALLOWED
