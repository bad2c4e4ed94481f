"""Text for a terminal; whatever came from a client is escaped in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BAR_CHARS = 30
_ID_CHARS = 60


def printable(text: str) -> str:
    """`text` without anything that a terminal would obey."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shortened(text: str, chars: int = _ID_CHARS) -> str:
    """`printable(text)` in at most `chars` characters."""
    text = printable(text)
    return text if len(text) <= chars else text[: chars - 1] + "…"


def counted(number: int, noun: str) -> str:
    """So many of a thing, such as "1 document"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns side by side: text to the left, numbers to the right."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [
        bool(rows) and all(isinstance(row[column], (int, float)) for row in rows)
        for column in range(len(header))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    )


def bar(used: float, capacity: float) -> str:
    """How full something is."""
    share = min(used / capacity, 1.0) if capacity else 0.0
    full = round(share * BAR_CHARS)
    return "█" * full + "░" * (BAR_CHARS - full)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return shortened(str(value))
