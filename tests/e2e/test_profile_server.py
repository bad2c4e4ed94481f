"""`rag-radix profile` with a real server of its own."""

from __future__ import annotations

import json

import orjson
import psutil
import pytest
from e2e.cpu_server import running_server
from e2e.exactness import MODEL

from rag_radix.cli import main
from rag_radix.cost_model import PrefillCostTable

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_a_model_is_profiled_and_its_server_ended(tmp_path, capsys):
    output = tmp_path / "profile.json"
    flags = ["--max-total-tokens", "2048", "--hicache-ratio", "4", "--page-size", "16"]
    arguments = ["--model-path", str(MODEL), "-o", str(output), "--max-tokens", "512"]
    before = set(psutil.Process().children(recursive=True))
    assert main(["profile", *arguments, "--repeats", "2", "--", *flags]) == 0
    assert set(psutil.Process().children(recursive=True)) <= before
    assert "beats recomputing" in capsys.readouterr().out

    content = orjson.loads(output.read_bytes())
    assert content["page_size"] == 16
    assert content["hits"]["host_problem"] is None
    assert all(content["hits"]["host_s"])
    assert PrefillCostTable.load(output).new_tokens[-1] == 512

    flags += ["--radix-eviction-policy-config", json.dumps({"cost_table": str(output)})]
    with running_server(MODEL, *flags, program="rag-radix") as server:
        log = server.log()
    assert f"prefill cost from {output}" in log
    assert "was measured with" not in log


def test_a_server_that_does_not_start_says_why(tmp_path, capsys):
    arguments = ["--model-path", str(tmp_path / "missing"), "-o", str(tmp_path / "profile.json")]
    assert main(["profile", *arguments]) == 2
    assert "its log ends with" in capsys.readouterr().err
    assert not (tmp_path / "profile.json").exists()
