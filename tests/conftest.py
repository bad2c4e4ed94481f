"""Hardware skips, and the checks that every server of a test runs with."""

from __future__ import annotations

import os

import pytest

# SGLang's own accounting, whose failure ends the server, and our tree's.
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "RAG_RADIX_CHECK_INTEGRITY": "1",
}


def pytest_configure() -> None:
    os.environ.update(CHECKS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_tests:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
