"""`rag-radix selftest` against a real server."""

from __future__ import annotations

import json

import pytest
from e2e.cpu_server import running_server
from e2e.tiny_model import make_tiny_llama

from rag_radix.cli import main

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    with running_server(
        model,
        "--radix-cache-backend",
        "knowledge-tree",
        "--enable-hierarchical-cache",
        "--hicache-ratio",
        "4",
        "--max-total-tokens",
        "12000",
        "--page-size",
        "16",
        "--dtype",
        "float32",
    ) as running:
        yield running


def test_a_server_with_the_knowledge_tree_passes_in_every_way(server, capsys) -> None:
    assert main(["selftest", "--url", server.url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["passed"]
    assert report["margin"] == 0
    assert not any(round_["skipped"] or round_["differences"] for round_ in report["rounds"])
    assert report["rounds"][-1]["host_tokens"] > 0


def test_a_server_that_does_not_answer_is_an_error(capsys) -> None:
    assert main(["selftest", "--url", "http://127.0.0.1:9"]) == 2
    assert "can't be reached" in capsys.readouterr().err
