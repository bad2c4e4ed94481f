"""Pairs of runs with and without speculation: what they are asked, and that they are kept."""

from __future__ import annotations

import argparse
from contextlib import ExitStack, nullcontext

import pytest
from rag_radix_benchmarks import speculation as module
from rag_radix_benchmarks.programs import ProgramOutcome
from rag_radix_frontend.retrieval_report import RetrievalReport

COUNTERS = ("started", "refused", "ended", "promoted", "cancelled", "wasted_tokens", "scheduler_s")


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    module.add_options(parser)
    small = ["--model-path", "some/model", "--fractions", "0.5", "--searches", "remote"]
    small += ["--requests", "3", "--warm-up", "2", "--loads", "0.5", "2", "--repeats", "2"]
    return parser.parse_args([*small, *map(str, arguments)])


class Server:
    """Stands for a server and all programs on it; speculation halves every time."""

    def __init__(self):
        self.runs = []
        self.interrupted_at = None

    def __call__(self, endpoint, retriever, k, output_tokens, speculative):
        def run(questions, due_s, first=0):
            if len(self.runs) == self.interrupted_at:
                raise KeyboardInterrupt
            self.runs.append((speculative, tuple(questions), due_s))
            seconds = 1.0 if speculative else 2.0
            report = RetrievalReport(search_s=seconds, search_not_overlapped_s=seconds / 10)
            # The first answer of a run is another one with speculation.
            texts = [str(question) for question in questions]
            texts[0] += "!" * speculative
            return [ProgramOutcome(seconds, 0.0, text, report) for text in texts]

        return argparse.Namespace(run=run)

    @property
    def measured(self):
        return [run for run in self.runs if run[2] is not None]

    def report(self, url):
        return {"speculation": dict.fromkeys(COUNTERS, len(self.runs))}


@pytest.fixture
def server(monkeypatch):
    server = Server()
    quiet = argparse.Namespace(wait_until_idle=lambda: None, flush=lambda: None)
    monkeypatch.setattr(module, "ProgramLoad", server)
    monkeypatch.setattr(module, "read_tree_report", server.report)
    monkeypatch.setattr(module, "serving", lambda *arguments: nullcontext("http://host"))
    monkeypatch.setattr(module, "ProfiledServer", lambda url: quiet)
    monkeypatch.setattr(module, "RagEndpoint", lambda url: None)
    searches = {(kind, 0.5): None for kind in ("local", "remote")}
    monkeypatch.setattr(module, "_searches", lambda options: searches)
    return server


def test_both_arms_are_asked_the_same_in_turn(server):
    module.measure(parsed())
    arms = [speculative for speculative, _, _ in server.measured]
    assert arms == [False, True, True, False] * 2
    for one, other in zip(server.measured[::2], server.measured[1::2], strict=True):
        assert one[1:] == other[1:]
    # A case's repeats differ, and every case has the same questions.
    assert server.measured[0][1:] != server.measured[2][1:]
    assert server.measured[0][1] == server.measured[4][1]


def test_another_seed_has_other_questions_and_arrivals(server):
    bench = module._Bench(parsed("--seed", 7), ExitStack())
    case = module.Case("remote", 0.5, 1.0)
    bench.pair(case, 1.0, 0)
    module._Bench(parsed("--seed", 70), ExitStack()).pair(case, 1.0, 0)
    one, _, other, _ = server.measured
    assert one[1] != other[1]
    assert one[2] != other[2]


def test_ratios_have_an_interval_and_answers_are_counted(server):
    report = module.measure(parsed())
    for case in report["cases"]:
        ratio = case["ratios"]["mean_ttft_s"]
        assert (ratio["value"], ratio["low"], ratio["high"]) == pytest.approx((2, 2, 2))
        assert case["answers"] == {"compared": 6, "different": 2}
        assert not case["same_answers"]
    # Each of four pairs has two runs and their warm-ups.
    assert report["server"]["started"] == 16
    assert "4 of 6" in module._table(report)


def test_an_interrupted_measurement_goes_on(server, tmp_path):
    options = parsed("--out", tmp_path)
    # The capacity's two loads, and the first pair's four.
    server.interrupted_at = 7
    with pytest.raises(KeyboardInterrupt):
        module.measure(options)
    server.interrupted_at = None
    report = module.measure(options)
    assert len(server.runs) == 7 + 3 * 4
    assert report["cases"][0]["answers"]["compared"] == 6
    whole = len(server.runs)
    again = module.measure(options)
    assert len(server.runs) == whole
    assert again["cases"] == report["cases"]
    assert "out" not in again["config"]
