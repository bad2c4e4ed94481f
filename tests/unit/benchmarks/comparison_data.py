"""A small comparison with figures that are easy to check."""

from __future__ import annotations

from typing import Any

from rag_radix_benchmarks.arms import STOCK_ARMS, Arm
from rag_radix_benchmarks.facts import ServerFacts
from rag_radix_benchmarks.limits import Limits
from rag_radix_benchmarks.load import Outcome, Run
from rag_radix_benchmarks.results import Cell, Comparison
from rag_radix_benchmarks.setup import Setup
from rag_radix_benchmarks.statistics import Throughput
from rag_radix_benchmarks.throughputs import Throughputs
from rag_radix_benchmarks.trials import TrialResult
from rag_radix_benchmarks.workload import Synthetic

SETUP = Setup(
    model_path="some/model",
    attention_backend="rag_prefix",
    device_tokens=4000,
    host_tokens=16000,
    page_size=16,
    chunk_tokens=2048,
    running_requests=4,
)
WORKLOAD = Synthetic(
    name="mmlu-like",
    documents=40,
    document_tokens=100,
    k=2,
    output_tokens=2,
    warm_up=10,
    requests=5,
    seed=3,
    drift_every=5,
    burst_window=5,
    most_prompt_tokens=3_000,
)


def facts_of(arm: Arm, **different: object) -> ServerFacts:
    """What a server says that is this arm, except for what is `different`."""
    built = {
        "device_tokens": 4000,
        "host_tokens": 16016 if arm.host_tier else 0,
        "page_size": 16,
        "chunk_tokens": 2048,
        "running_requests": 4,
        "attention": "PrefixAttnBackend",
        "dtype": "torch.bfloat16",
        "kv_dtype": "torch.bfloat16",
        "tp_size": 1,
        **arm.built,
    }
    facts = {"model": "some/model", "attention_backend": "rag_prefix"}
    facts = {name: different.pop(name, value) for name, value in facts.items()}
    return ServerFacts(**facts, built={**built, **different})


def result_of(
    arm: Arm, ttft_s: float, *, hit_tokens: int = 0, answer: int = 7, late_s: float = 0.0
) -> TrialResult:
    """A run in which every request went the same way."""
    outcome = Outcome(
        ttft_s=ttft_s,
        latency_s=ttft_s + 0.5,
        late_s=late_s,
        prompt_tokens=400,
        device_tokens=hit_tokens,
        host_tokens=0,
        output_tokens=2,
        output_ids=(answer, 8),
    )
    run = Run((outcome,) * WORKLOAD.requests, tuple(range(WORKLOAD.requests)), seconds=10.0)
    return TrialResult(run, facts_of(arm))


ARMS = [STOCK_ARMS[name] for name in ("no-cache", "stock-lru", "stock-hicache")]


def example_report() -> dict[str, Any]:
    """Of `bench ab`: three arms at two loads, the last four and two times as fast as the others."""
    parts = [WORKLOAD.part(repeat) for repeat in range(2)]
    cells = {
        load: {
            arm.name: Cell((result_of(arm, seconds), result_of(arm, 1.1 * seconds)))
            for arm, seconds in zip(ARMS, (4.0, 2.0, 1.0), strict=True)
        }
        for load in ("1 request/s", "2 requests/s")
    }
    limits = Limits.of(parts, SETUP, lambda cached, new: float(new))
    found = {
        "no-cache": [Throughput(None, 1.0, {0.1: 2.0})] * 2,
        "stock-lru": [Throughput(1.0, 1.0, {0.1: 0.2, 1.0: 0.9})] * 2,
        "stock-hicache": [Throughput(2.0, 1.0, {0.1: 0.2, 2.0: 0.9})] * 2,
    }
    return {
        "benchmark": "ab",
        **Comparison(cells, "stock-hicache", parts, limits).as_json(),
        "throughput": Throughputs(found, found).as_json("stock-hicache"),
        "commits": ["c0ffee"],
        "versions": {"sglang": "0.5.23"},
        "hardware": {"cores": 2, "processor": "a processor", "memory_bytes": 2**34},
        "config": {
            "model_path": "some/model",
            "arms": ",".join(arm.name for arm in ARMS),
            "repeats": 2,
            "flags": {arm.name: SETUP.flags(arm) for arm in ARMS},
        },
        "command": ["bench", "ab", "--arms", "a,b c"],
    }
