"""One server for the tests in this folder: a tiny model on a device tier and a host tier, which
together hold less than the tests ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.cpu_server import Server, running_server
from e2e.tiny_model import make_tiny_llama

FLAGS = ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
FLAGS += ["--max-total-tokens", "2048", "--hicache-ratio", "4", "--dtype", "float32"]
FLAGS += ["--context-length", "1024", "--chunked-prefill-size", "128"]


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(make_tiny_llama(tmp_path_factory.mktemp("model")), *FLAGS) as running:
        yield running
