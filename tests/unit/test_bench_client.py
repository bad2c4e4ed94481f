"""The client benchmark runs end to end, on one round of few retrievals."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_it_reports_what_each_client_spends_with_and_without_guesses(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    arguments = ["--json", "--guesses", "2", "--rounds", "1", "--retrievals", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_client.py", *arguments])
    importlib.import_module("bench_client").main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["clients"]) == {"programs", "chats"}
    for measured in result["clients"].values():
        assert measured["2"]["off_ms"] > 0
        assert measured["2"]["on_ms"] > 0
