"""How a command of `rag-radix` ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rag_radix.errors import RagRadixError


def exit_status(command: Callable[[], object]) -> int:
    """Run `command`; 0, or 2 after an error of ours, which is printed, or 130 when interrupted."""
    try:
        command()
    except RagRadixError as error:
        print(f"rag-radix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
