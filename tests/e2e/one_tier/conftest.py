"""One server for the tests in this folder: the real model, on a device tier alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.cpu_server import Server, running_server
from e2e.exactness import MODEL

FLAGS = ["--max-total-tokens", "8192", "--context-length", "4096", "--dtype", "float32"]


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with running_server(MODEL, *FLAGS, "--radix-cache-backend", "knowledge-tree") as running:
        yield running
