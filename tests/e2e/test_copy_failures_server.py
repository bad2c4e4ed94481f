"""Copies to host fail on one rank of two, and the server goes on with the same tree on both."""

from __future__ import annotations

import json
import random

import pytest
from e2e.cpu_server import running_server
from e2e.exactness import ask, ask_all, assert_intact, make_prompts
from e2e.plugins import environment_with
from e2e.tiny_model import make_tiny_llama

pytestmark = [pytest.mark.server, pytest.mark.slow]

FLAGS = ["--dtype", "float32", "--max-total-tokens", "1024", "--tp-size", "2"]
FLAGS += ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
FLAGS += ["--hicache-ratio", "4"]
# A plugin of SGLang, which is loaded in every process.
PLUGIN = """
import random

def register():
    import torch
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine

    submit, rng = L2TransferEngine.submit_device_to_host, random.Random(0)

    def submit_or_not(engine, transfers):
        if torch.distributed.get_rank() == 1 and rng.random() < 0.4:
            raise RuntimeError("this copy fails")
        return submit(engine, transfers)

    L2TransferEngine.submit_device_to_host = submit_or_not
"""
# Every call into the tree is compared between the ranks, and a difference ends the server.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}


@pytest.mark.parametrize("swap_out", ["on_evict", "eager"])
def test_copies_that_fail_on_one_rank_cost_hits_and_nothing_else(tmp_path, swap_out):
    flags = [*FLAGS, "--radix-eviction-policy-config", json.dumps({"swap_out": swap_out})]
    if swap_out == "eager":
        flags += ["--hicache-storage-backend", "file"]
        flags += ["--file-storage-path", str(tmp_path / "files")]
    prompts = make_prompts(24, page_size=16, chunk_tokens=128)
    rng, host_hit = random.Random(1), 0
    env = environment_with(PLUGIN, tmp_path / "plugin") | TWO_RANKS
    with running_server(make_tiny_llama(tmp_path / "model"), *flags, env=env) as server:
        expected = [ask(server, prompt).tokens for prompt in prompts]
        assert len(set(expected)) > len(prompts) // 2
        for concurrency in (1, 4, 1):
            order = rng.sample(range(len(prompts)), len(prompts))
            answers = ask_all(server, [prompts[i] for i in order], concurrency=concurrency)
            assert [answer.tokens for answer in answers] == [expected[i] for i in order]
            host_hit += sum(answer.host_hit for answer in answers)
        report = assert_intact(server)
        assert report["swap"]["failed_nodes"] > 0
        assert report["swap"]["out_nodes"] > report["swap"]["failed_nodes"]
        assert host_hit > 0
        assert "this copy fails" in server.log()
