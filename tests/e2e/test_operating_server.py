"""What an operator may rely on by default, on a server of two ranks without storage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.cpu_server import Server, running_server
from e2e.exactness import assert_intact
from e2e.tiny_model import make_tiny_llama

from rag_radix.swap_out import _HOT_USES

pytestmark = [pytest.mark.server, pytest.mark.slow]

FLAGS = ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
FLAGS += ["--max-total-tokens", "2048", "--hicache-ratio", "2", "--context-length", "1024"]
FLAGS += ["--page-size", "16", "--dtype", "float32", "--tp-size", "2"]
# Every call into the tree is compared between the ranks, and a difference ends the server.
ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
SYSTEM = list(range(300, 332))
DOCUMENT_TOKENS = 96


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    with running_server(model, *FLAGS, env=ENV) as running:
        yield running


def ask(server: Server, document: int) -> Any:
    start = len(SYSTEM)
    first = 1000 + DOCUMENT_TOKENS * document
    span = {"id": f"d{document}", "start": start, "end": start + DOCUMENT_TOKENS}
    custom = {"rag": {"documents": [span]}}
    return server.generate(
        input_ids=[*SYSTEM, *range(first, first + DOCUMENT_TOKENS), 7, 8],
        sampling_params={"temperature": 0, "max_new_tokens": 2, "custom_params": custom},
    )


def top(server: Server) -> list[dict[str, Any]]:
    """The nodes that prompts begin with."""
    nodes: list[dict[str, Any]] = server.get("/rag/tree?depth=1")["tree"]["children"]
    return [node for node in nodes if node["tokens"] == len(SYSTEM)]


def test_a_system_prompt_has_a_host_copy_once_it_is_hot_and_keeps_it(server: Server) -> None:
    for document in range(_HOT_USES - 1):
        ask(server, document)
    (node,) = top(server)
    assert (node["device"], node["host"]) == (True, False)
    ask(server, _HOT_USES - 1)
    (node,) = top(server)
    assert (node["device"], node["host"]) == (True, True)
    assert server.get("/rag/stats")["host"]["cached_tokens"] == len(SYSTEM)
    order = random.Random(1)
    for _ in range(120):  # both tiers turn over
        ask(server, order.randrange(60))
        (node,) = top(server)
        assert node["host"]
    stats = assert_intact(server)
    assert stats["device"]["evicted_nodes"] > 0
    assert stats["host"]["evicted_nodes"] > 0
    assert node["frequency"] >= 120
