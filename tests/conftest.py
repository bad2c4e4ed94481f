"""The checks that every server of a test runs with, and fresh processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fresh import Fresh, fresh_processes

# SGLang's own accounting, whose failure ends the server, and our tree's.
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "RAG_RADIX_CHECK_INTEGRITY": "1",
}


def pytest_configure() -> None:
    os.environ.update(CHECKS)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    with fresh_processes(tmp_path_factory.mktemp("fresh")) as processes:
        yield processes
