"""What an operator may rely on by default, on a server of two ranks without storage."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.cpu_server import Server, running_server
from e2e.exactness import assert_intact
from e2e.tiny_model import make_tiny_llama
from e2e.waiting import until

from rag_radix.swap_out import _HOT_USES

pytestmark = [pytest.mark.server, pytest.mark.slow]

FLAGS = ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
FLAGS += ["--max-total-tokens", "2048", "--hicache-ratio", "2", "--context-length", "1024"]
FLAGS += ["--page-size", "16", "--dtype", "float32", "--tp-size", "2"]
# Every call into the tree is compared between the ranks, and a difference ends the server.
ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
SYSTEM = list(range(300, 332))
DOCUMENT_TOKENS = 96
WARM_PREFIX, WARM = list(range(400, 448)), 100  # its first document


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("operating")
    model, order = make_tiny_llama(folder / "model"), folder / "warm.json"
    documents = [{"id": f"w{i}", "tokens": tokens(WARM + i)} for i in range(3)]
    order.write_text(json.dumps({"prefix": WARM_PREFIX, "documents": documents}))
    config = ["--radix-eviction-policy-config", json.dumps({"warm": str(order)})]
    with running_server(model, *FLAGS, *config, env=ENV) as running:
        yield running


def tokens(document: int) -> list[int]:
    first = 1000 + DOCUMENT_TOKENS * document
    return list(range(first, first + DOCUMENT_TOKENS))


def ask(server: Server, document: int, prefix: list[int] = SYSTEM) -> int:
    """Returns the tokens found."""
    span = {"id": f"d{document}", "start": len(prefix), "end": len(prefix) + DOCUMENT_TOKENS}
    custom = {"rag": {"documents": [span]}}
    reply = server.generate(
        input_ids=[*prefix, *tokens(document), 7, 8],
        sampling_params={"temperature": 0, "max_new_tokens": 2, "custom_params": custom},
    )
    return int(reply["meta_info"]["cached_tokens"])


def top(server: Server) -> list[dict[str, Any]]:
    """The nodes that prompts begin with."""
    nodes: list[dict[str, Any]] = server.get("/rag/tree?depth=1")["tree"]["children"]
    return [node for node in nodes if node["tokens"] == len(SYSTEM)]


def test_what_is_to_be_warmed_at_the_start_is_there_before_the_first_question(
    server: Server,
) -> None:
    until(lambda: server.get("/rag/warm")["state"] == "done")
    assert server.get("/rag/warm")["warmed"] == 3
    for document in range(WARM, WARM + 3):
        assert ask(server, document, WARM_PREFIX) == len(WARM_PREFIX) + DOCUMENT_TOKENS
    server.post("/rag/invalidate", {"all": True})


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
