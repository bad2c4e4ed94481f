"""`rag-radix bench ab` on real servers of a tiny model, and the wrong arms that it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from e2e.cpu_server import Server, running_server
from e2e.tiny_model import make_tiny_llama
from rag_radix_frontend import build_index
from safetensors.torch import load_file, save_file

from rag_radix.cli import main
from rag_radix.environment import COMPARISON

pytestmark = [pytest.mark.server, pytest.mark.slow]

DEVICE_TOKENS = 1500
SIZES = ["--device-tokens", str(DEVICE_TOKENS), "--host-tokens", "4000", "--page-size", "1"]
SIZES += ["--chunk-tokens", "512", "--running-requests", "2"]
LOAD = ["--documents", "40", "--document-tokens", "80", "--warm-up", "20", "--requests", "10"]
FLAGS = ["--", "--dtype", "float32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def stock_lru(model: Path) -> Iterator[Server]:
    """A running `stock-lru`, for arms that are given by their URL."""
    flags = ["--attention-backend", "rag_prefix", "--max-total-tokens", str(DEVICE_TOKENS)]
    flags += ["--chunked-prefill-size", "512", "--max-running-requests", "2", "--page-size", "1"]
    flags.append("--enable-cache-report")
    with running_server(model, *flags, *FLAGS[1:], env={COMPARISON.name: "1"}) as server:
        yield server


def bench(model: Path, arms: str, *options: str) -> int:
    arguments = ["--model-path", str(model), "--arms", arms, *SIZES, *LOAD, *options]
    return main(["bench", "ab", *arguments, *FLAGS])


def test_two_arms_are_compared_and_a_second_run_measures_nothing(
    model, stock_lru, tmp_path, capsys
):
    arms = f"stock-lru@{stock_lru.url},stock-hicache,knowledge-tree"
    options = ["--repeats", "2", "--loads", "0.5", "--out", str(tmp_path / "out")]
    options += ["--report", str(tmp_path / "report"), "--json"]
    before = set(psutil.Process().children(recursive=True))
    assert bench(model, arms, *options) == 0
    assert set(psutil.Process().children(recursive=True)) <= before
    report = json.loads(capsys.readouterr().out.splitlines()[-1])

    (by_arm,) = report["loads"].values()
    (ratios,) = report["ratios"].values()
    for figures in by_arm.values():
        assert figures["requests"] == 20
        assert 0 < figures["ttft_s"]["p50"] <= figures["ttft_s"]["p99"]
        assert 0 < figures["document_hit_rate"] < figures["token_hit_rate"] < 1
    assert by_arm["stock-lru"]["host_hit_rate"] == 0
    assert by_arm["stock-lru"]["moved_bytes"] is None
    assert by_arm["stock-hicache"]["moved_bytes"]["out"] > 0
    assert by_arm["knowledge-tree"]["moved_bytes"]["out"] > 0
    assert by_arm["stock-hicache"]["evicted_tokens"] is None
    assert by_arm["knowledge-tree"]["evicted_tokens"]["device"] > 0
    for figures in by_arm.values():
        assert all(seconds > 0 for seconds in figures["scheduling_parts_s"].values())
    ratio = ratios["stock-lru"]["mean_ttft"]
    assert ratio["low"] < ratio["value"] < ratio["high"]
    # The model computes in 32 bits, where a cached prefix changes no token.
    assert report["answers"]["stock-lru"] == {
        "compared": 20,
        "different": 0,
        "first_tokens_different": 0,
    }
    assert report["servers"]["stock-lru"]["built"]["cache"] == "UnifiedRadixCache"
    assert report["servers"]["knowledge-tree"]["built"]["cache"] == "KnowledgeTree"
    assert (tmp_path / "report" / "report.md").exists()

    assert bench(model, arms, *options) == 0
    again = capsys.readouterr()
    assert "mean TTFT" not in again.err
    assert json.loads(again.out.splitlines()[-1])["loads"] == report["loads"]


def test_a_peer_is_asked_through_the_openai_interface(model, stock_lru, capsys):
    # SGLang has that interface as well: the same server must do the same behind both.
    arms = f"stock-lru@{stock_lru.url},openai:peer@{stock_lru.url}"
    assert bench(model, arms, "--repeats", "1", "--concurrency", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    native, peer = report["loads"]["1 at once"].values()
    assert peer["token_hit_rate"] == native["token_hit_rate"] > 0
    assert peer["tpot_s"]["mean"] > 0
    assert report["answers"] == {
        "stock-lru": {"compared": 10, "different": 0, "first_tokens_different": 0}
    }


def test_programs_search_while_they_generate(model, stock_lru, tmp_path, capsys):
    source = tmp_path / "source.jsonl"
    texts = (
        f"Note {number}\n\nThe number after {number} is {number + 1}." for number in range(200)
    )
    lines = (json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(texts))
    source.write_text("\n".join(lines))
    build_index(source, tmp_path / "index", kind="ivf")
    arms = f"stock-lru@{stock_lru.url},knowledge-tree+speculation"
    options = ["--corpus", str(tmp_path / "index"), "--programs", "--search-ms", "200"]
    options += ["--repeats", "1", "--concurrency", "1", "--output-tokens", "2", "--json"]
    assert bench(model, arms, *options) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])

    stock, ours = report["loads"]["1 at once"].values()
    assert 0.2 <= stock["search_not_overlapped_s"] <= stock["ttft_s"]["mean"]
    assert ours["search_not_overlapped_s"] < ours["ttft_s"]["mean"]
    (tree,) = report["trees"]["1 at once"].values()
    assert tree["speculation"]["promoted"] > 0
    # The same tokens are asked of both, though only one of them cuts prompts at documents.
    assert report["answers"]["stock-lru"] == {
        "compared": 10,
        "different": 0,
        "first_tokens_different": 0,
    }


@pytest.mark.parametrize(
    ("arm", "options", "named"),
    [
        ("knowledge-tree", [], "cache is 'UnifiedRadixCache', not 'KnowledgeTree'"),
        ("stock-radixcache-lru", [], "cache is 'UnifiedRadixCache', not 'RadixCache'"),
        ("no-cache", [], "caching is True, not False"),
        ("stock-lpm", [], "order is 'fcfs', not 'lpm'"),
        ("stock-hicache", [], "host_tokens is 0, not 4000"),
        ("stock-lru", ["--device-tokens", "3000"], "device_tokens is 1500, not 3000"),
        ("stock-lru", ["--running-requests", "4"], "running_requests is 2, not 4"),
        ("stock-lru", ["--attention-backend", "torch_native"], "attention_backend is 'rag_prefix'"),
    ],
)
def test_a_server_that_is_another_arm_is_refused(model, stock_lru, capsys, arm, options, named):
    arms = f"{arm}@{stock_lru.url},stock-hicache-lfu@{stock_lru.url}"
    assert bench(model, arms, "--concurrency", "1", *options) == 2
    output = capsys.readouterr()
    assert named in output.err
    assert output.out == ""


def test_a_server_of_another_model_is_refused(stock_lru, tmp_path, capsys):
    another = make_tiny_llama(tmp_path / "another")
    arms = f"stock-lru@{stock_lru.url},stock-lpm@{stock_lru.url}"
    assert bench(another, arms, "--concurrency", "1") == 2
    assert "model is" in capsys.readouterr().err


@contextmanager
def other_weights(model: Path) -> Iterator[None]:
    """The model's folder with weights of another one in it."""
    weights, kept = model / "model.safetensors", model / "kept"
    weights.rename(kept)
    torch.manual_seed(1)
    other = {name: 0.3 * torch.randn_like(each) for name, each in load_file(kept).items()}
    save_file(other, weights, metadata={"format": "pt"})
    try:
        yield
    finally:
        kept.replace(weights)


def test_a_server_that_states_the_model_and_answers_from_another_is_refused(
    model, stock_lru, capsys
):
    options = ["--repeats", "1", "--concurrency", "1", "--reference", "stock-lpm"]
    with other_weights(model):
        assert bench(model, f"stock-lru@{stock_lru.url},stock-lpm", *options) == 2
    assert re.search("answer [0-9]+ of 10 requests differently", capsys.readouterr().err)


def test_a_server_that_does_not_say_what_it_is_is_refused(model, capsys):
    assert bench(model, "stock-lru@http://127.0.0.1:9,stock-lpm@http://127.0.0.1:9") == 2
    assert "doesn't answer as such a server does" in capsys.readouterr().err
