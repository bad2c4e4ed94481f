"""A small comparison with figures that are easy to check."""

from __future__ import annotations

from rag_radix_benchmarks.arms import Arm
from rag_radix_benchmarks.facts import ServerFacts
from rag_radix_benchmarks.load import Outcome, Run
from rag_radix_benchmarks.setup import Setup
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
)


def facts_of(arm: Arm, **different: object) -> ServerFacts:
    """What a server says that is this arm, except for what is `different`."""
    built = {
        "device_tokens": 4000,
        "host_tokens": 16016 if arm.host_tier else 0,
        "page_size": 16,
        "chunk_tokens": 2048,
        "running_requests": 4,
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
