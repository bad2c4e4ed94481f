"""All environment variables of rag-radix but one.

`RAG_RADIX_SHARED_PREFIX` belongs to the kernels, which know nothing of this package: see
`rag_radix_kernels.options`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """An environment variable that is on when set to anything but "" or "0"."""

    name: str
    meaning: str

    def is_set(self) -> bool:
        return os.environ.get(self.name, "") not in ("", "0")


CHECK_INTEGRITY = Flag(
    "RAG_RADIX_CHECK_INTEGRITY",
    "check the tree's invariants on every GET /rag/stats; for tests, costs O(nodes)",
)

COMPARISON = Flag(
    "RAG_RADIX_COMPARISON",
    "state in /server_info which cache was built, for a comparison of servers, and offer SGLang's "
    "RadixCache as --radix-cache-backend sglang-radix-cache",
)
