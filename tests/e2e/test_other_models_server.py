"""Other attention layouts and two tensor-parallel ranks, on tiny models of random weights."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from e2e.cpu_server import running_server
from e2e.exactness import ask, ask_all, assert_intact, make_prompts
from e2e.tiny_model import make_tiny_llama, make_tiny_mla

from rag_radix.cost_model import PrefillCostTable

pytestmark = [pytest.mark.server, pytest.mark.slow]

FLAGS = ["--dtype", "float32", "--max-total-tokens", "1024", "--page-size", "16"]
FLAGS += ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
FLAGS += ["--hicache-ratio", "4"]


def assert_cached_answers_equal_cold_ones(server):
    prompts = make_prompts(30, page_size=16, chunk_tokens=128)
    cold = []
    for prompt in prompts:
        server.flush_cache()
        cold.append(ask(server, prompt).tokens)
    # Else the model would say the same whatever it reads, and the rest could not fail.
    assert len(set(cold)) > 20
    server.flush_cache()
    for concurrency in (1, 4, 30, 1):
        answers = ask_all(server, prompts, concurrency=concurrency)
        assert [answer.tokens for answer in answers] == cold
    report = assert_intact(server)
    assert report["swap"]["out_tokens"] > 0
    assert report["requests"]["host_hit_tokens"] > 0


@pytest.mark.parametrize("policy", ["pgdsf", "pgdsf-plus", "adaptive"])
@pytest.mark.parametrize("swap_out", ["on_evict", "eager"])
def test_two_ranks_decide_and_answer_alike(tmp_path, policy, swap_out):
    # Every call into the tree is compared between the ranks, and a difference ends the server.
    env = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    }
    flags = [*FLAGS, "--tp-size", "2", "--radix-eviction-policy", policy]
    profile = tmp_path / "profile.json"
    table = PrefillCostTable((0, 512), (1, 512), ((0.001, 0.5), (0.002, 0.9)))
    profile.write_text(json.dumps(asdict(table)))
    config = {"swap_out": swap_out, "cost_table": str(profile)}
    flags += ["--radix-eviction-policy-config", json.dumps(config)]
    with running_server(make_tiny_llama(tmp_path), *flags, env=env) as server:
        assert_cached_answers_equal_cold_ones(server)
        assert f"prefill cost from {profile}" in server.log()


def test_latent_attention_is_exact_over_both_tiers(tmp_path):
    with running_server(make_tiny_mla(tmp_path), *FLAGS) as server:
        assert_cached_answers_equal_cold_ones(server)
