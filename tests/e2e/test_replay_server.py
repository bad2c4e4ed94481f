"""A replay of a trace finds what a server found that served it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cpu_server import Server, running_server
from e2e.exactness import MODEL, stats

from rag_radix.cli import main
from rag_radix.cost_model import PrefillCostTable, default_cost_table
from rag_radix.policies import DEFAULT_POLICY
from rag_radix.replay.plan import host_gib
from rag_radix.replay.runs import PolicyVariant, ReplayServer, replay
from rag_radix.replay.trace import TraceRequest, read_trace
from rag_radix.replay.workloads import generate

pytestmark = [pytest.mark.server, pytest.mark.slow]

REQUESTS = 300
WARM_UP = 60
DEVICE_TOKENS = 2048
HOST_RATIO = 3
POLICY = PolicyVariant(DEFAULT_POLICY, DEFAULT_POLICY)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay") / "trace.jsonl"


@pytest.fixture(scope="module")
def server(recorded: Path) -> Iterator[Server]:
    flags = ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
    flags += ["--max-total-tokens", str(DEVICE_TOKENS), "--hicache-ratio", str(HOST_RATIO)]
    flags += ["--dtype", "float32", "--radix-eviction-policy", POLICY.policy]
    flags += ["--radix-eviction-policy-config", json.dumps({"trace": str(recorded)})]
    with running_server(MODEL, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    return generate(
        "mmlu-like",
        requests=REQUESTS,
        seed=5,
        documents=120,
        mean_document_tokens=100,
        output_tokens=1,
    )


def test_replay_and_plan_foresee_the_hit_rate_of_a_server(
    server, requests, recorded, tmp_path, capsys
):
    live = _live_hit_rate(server, requests)
    imagined = _server_like(server)
    replayed = replay(requests, POLICY, imagined, warm_up=WARM_UP).prompt_hit_rate
    planned = _planned_hit_rate(recorded, imagined, tmp_path / "cost.json", capsys)
    with capsys.disabled():
        print(f"live {live:.4f}, replayed {replayed:.4f}, planned {planned:.4f}")
    assert 0.1 < live < 0.9
    assert replayed == pytest.approx(live, abs=0.01)
    assert planned == pytest.approx(live, abs=0.02)


def _live_hit_rate(server: Server, requests: list[TraceRequest]) -> float:
    """Cached tokens by prompt tokens of `requests`, one at a time, after the warm-up."""
    ids = _TokenIds()
    before = stats(server)["requests"]
    for index, request in enumerate(requests):
        if index == WARM_UP:
            before = stats(server)["requests"]
        server.generate(**ids.body(request))
    after = stats(server)["requests"]
    hit = sum(after[name] - before[name] for name in ("device_hit_tokens", "host_hit_tokens"))
    return float(hit / (after["prompt_tokens"] - before["prompt_tokens"]))


def _planned_hit_rate(
    trace: Path, imagined: ReplayServer, cost: Path, capsys: pytest.CaptureFixture[str]
) -> float:
    """What `rag-radix plan` says of a server's size, from the trace that the server has written."""
    grid = (imagined.cost.cached_tokens, imagined.cost.new_tokens)
    seconds = [[imagined.cost(cached, new) for new in grid[1]] for cached in grid[0]]
    names = ("cached_tokens", "new_tokens", "seconds")
    cost.write_text(json.dumps(dict(zip(names, (*grid, seconds), strict=True))))
    # SGLang's own warm-up request comes first.
    warm_up = len(read_trace(trace)) - REQUESTS + WARM_UP
    arguments = ["--trace", str(trace), "--warm-up", str(warm_up), "--cost-table", str(cost)]
    arguments += ["--gpu-tokens", str(imagined.device_tokens)]
    arguments += ["--host-gib", host_gib(imagined.host_tokens, imagined)]
    arguments += ["--page-size", str(imagined.page_size), "--policy", POLICY.policy]
    assert main(["plan", *arguments, "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    return float(cell["prompt_hit_rate"])


def _server_like(server: Server) -> ReplayServer:
    report = stats(server)
    return ReplayServer(
        device_tokens=report["device"]["capacity_tokens"],
        host_tokens=report["host"]["capacity_tokens"],
        page_size=report["page_size"],
        cost=_cost_from_shape(),
    )


def _cost_from_shape() -> PrefillCostTable:
    config = json.loads((MODEL / "config.json").read_text())
    return default_cost_table(
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        context_tokens=config["max_position_embeddings"],
    )


class _TokenIds:
    """Texts of a trace as tokens of the model, drawn at random for each document."""

    def __init__(self) -> None:
        self._questions = random.Random(0)

    def body(self, request: TraceRequest) -> dict[str, object]:
        tokens: list[int] = []
        documents = []
        for gap, document in enumerate(request.documents):
            tokens += self._text(f"gap {gap}", document.start - len(tokens))
            tokens += self._text(document.id + document.version, document.end - document.start)
            documents.append({"id": document.id, "version": document.version})
            documents[-1] |= {"start": document.start, "end": document.end}
        tokens += self._draw(self._questions, request.prompt_tokens - len(tokens))
        return {
            "input_ids": tokens,
            "sampling_params": {
                "max_new_tokens": request.output_tokens,
                "ignore_eos": True,
                "custom_params": {"rag": {"documents": documents}},
            },
        }

    @classmethod
    def _text(cls, name: str, tokens: int) -> list[int]:
        return cls._draw(random.Random(name), tokens)

    @staticmethod
    def _draw(rng: random.Random, tokens: int) -> list[int]:
        return [rng.randrange(1000, 48_000) for _ in range(tokens)]
