"""Two tensor-parallel ranks decide alike and answer alike, cached or not."""

from __future__ import annotations

import pytest
from e2e.cpu_server import running_server
from e2e.exactness import STRICT, ask, ask_all, assert_intact, make_prompts
from e2e.tiny_model import make_tiny_model

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_two_ranks_evict_load_back_and_answer_alike(tmp_path):
    prompts = make_prompts(30, page_size=16, chunk_tokens=256)
    flags = ["--load-format", "dummy", "--dtype", "float32", "--tp-size", "2"]
    flags += ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
    flags += ["--hicache-ratio", "4", "--max-total-tokens", "2048", "--page-size", "16"]
    # Every call into the tree is compared between the ranks, and a difference ends the server.
    env = {
        **STRICT,
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    }
    with running_server(make_tiny_model(tmp_path), *flags, env=env) as server:
        cold = []
        for prompt in prompts:
            server.flush_cache()
            cold.append(ask(server, prompt).tokens)
        server.flush_cache()
        for concurrency in (1, 4, 1):
            answers = ask_all(server, prompts, concurrency=concurrency)
            assert [answer.tokens for answer in answers] == cold
        report = assert_intact(server)
        assert report["swap"]["out_tokens"] > 0
        assert report["requests"]["host_hit_tokens"] > 0
