"""The checks that every server of a test runs with."""

from __future__ import annotations

import os

# SGLang's own accounting, whose failure ends the server, and our tree's.
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "RAG_RADIX_CHECK_INTEGRITY": "1",
}


def pytest_configure() -> None:
    os.environ.update(CHECKS)
