"""The tree finds and moves what an independent slow model of it does, token for token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from oracle import Oracle, OraclePolicy, Served
from oracle_policies import (
    Adaptive,
    Gdsf,
    Lfu,
    Lru,
    Pgdsf,
    PgdsfPlus,
    S3Fifo,
    Slru,
    WTinyLfu,
)

from rag_radix.replay.driver import knowledge_tree_replayer
from rag_radix.replay.reference_cost import a10g_mistral_cost_table
from rag_radix.replay.trace import TraceRequest
from rag_radix.replay.workloads import generate

COST = a10g_mistral_cost_table()
GHOSTS = 1 << 16

POLICIES: dict[str, tuple[str, dict[str, Any], Callable[[], OraclePolicy]]] = {
    "lru": ("lru", {}, Lru),
    "pgdsf-node": ("pgdsf", {"frequency": "node"}, lambda: Pgdsf("node")),
    "pgdsf-document": ("pgdsf", {"frequency": "document"}, lambda: Pgdsf("document")),
    "gdsf": ("gdsf", {}, Gdsf),
    "lfu": ("lfu", {}, Lfu),
    "slru": ("slru", {}, Slru),
    "w-tinylfu": ("w-tinylfu", {}, WTinyLfu),
    "s3-fifo": ("s3-fifo", {}, S3Fifo),
    "adaptive": ("adaptive", {}, Adaptive),
    "pgdsf-plus": ("pgdsf-plus", {}, lambda: PgdsfPlus(GHOSTS)),
}


def small_trace(workload: str, seed: int, requests: int, k: int = 2) -> list[TraceRequest]:
    """Few and short documents; a tenant's prompts begin in public up to some document or none."""
    trace = generate(
        workload, requests=requests, seed=seed, k=k, documents=90, mean_document_tokens=60
    )
    for i in range(0, requests, 3):
        documents = trace[i].documents
        begins = [0, documents[0].start, *(each.end for each in documents)]
        trace[i] = replace(trace[i], namespace="b", shared_tokens=begins[i // 3 % len(begins)])
    return trace


def compare(
    name: str,
    trace: list[TraceRequest],
    *,
    device: int = 1000,
    host: int = 2000,
    ghosts: int | None = None,
    queue: int = 0,
    max_depth: int | None = None,
) -> int:
    """Serve `trace` on both; returns the tokens that were found."""
    policy, config, make = POLICIES[name]
    oracle_policy = make() if ghosts is None else PgdsfPlus(ghosts)
    oracle = Oracle(oracle_policy, device, host, COST, max_depth)
    found = 0
    with knowledge_tree_replayer(
        policy,
        {**config, "max_depth": max_depth},
        device_tokens=device,
        host_tokens=host,
        longest_request_tokens=device,
        cost=COST,
        page_size=1,
    ) as it:
        if ghosts is not None:
            it.tree.histories._capacity = ghosts
        host_slots = it.tree.swap_out.host_slots
        for index, served in enumerate(it.run(trace, queue)):
            request = trace[index]
            oracle.expect(trace[index + 1 : index + 1 + queue])
            expected = oracle.serve(request)
            actual = Served(
                served.device_hit_tokens,
                served.host_hit_tokens,
                served.swapped_out_tokens,
                device - it.tree.token_to_kv_pool_allocator.available_size(),
                host - host_slots.available_tokens if host else 0,
            )
            assert actual == expected, (index, request)
            found += served.hit_tokens
        it.tree.check_integrity()
    return found


@pytest.mark.parametrize(("workload", "seed"), [("mmlu-like", 11), ("drift-burst", 21)])
@pytest.mark.parametrize("name", POLICIES)
def test_every_request_finds_and_moves_the_same(name, workload, seed):
    assert compare(name, small_trace(workload, seed, 150)) > 0


@pytest.mark.parametrize("name", ["adaptive", "pgdsf-plus"])
def test_a_host_tier_that_holds_two_documents(name):
    assert compare(name, small_trace("mmlu-like", 41, 150), host=300) > 0


def test_ghosts_that_are_forgotten():
    assert compare("pgdsf-plus", small_trace("drift-burst", 31, 150), ghosts=40) > 0


def test_without_a_host_tier():
    assert compare("pgdsf-plus", small_trace("mmlu-like", 31, 100), host=0) > 0


@pytest.mark.parametrize("host", [0, 600, 2000])
@pytest.mark.parametrize("workload", ["mmlu-like", "drift-burst"])
def test_uses_by_waiting_requests(workload, host):
    trace = small_trace(workload, 51, 150)
    assert compare("pgdsf-plus", trace, host=host, queue=20) > 0


def test_uses_by_waiting_requests_of_paths_that_are_forgotten():
    assert compare("pgdsf-plus", small_trace("mmlu-like", 61, 150), ghosts=40, queue=20) > 0


@pytest.mark.parametrize("max_depth", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_documents_beyond_max_depth(name, max_depth):
    trace = generate("mmlu-like", requests=120, seed=71, k=3, documents=90, mean_document_tokens=60)
    for index, request in enumerate(trace):
        # No two prompts go on alike below: what else is in a tail may be cut anywhere.
        kept, own = request.documents[:max_depth], request.documents[max_depth:]
        starts = [kept[-1].end, *(each.start for each in own[1:])]
        own = tuple(
            replace(each, id=f"{index} {each.id}", start=start)
            for each, start in zip(own, starts, strict=True)
        )
        trace[index] = replace(request, documents=kept + own)
    assert compare(name, trace, max_depth=max_depth) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("k", "host"), [(1, 300), (2, 2000), (4, 5000)])
@pytest.mark.parametrize("workload", ["mmlu-like", "drift-burst", "update-heavy", "hotpot-like"])
@pytest.mark.parametrize("name", POLICIES)
def test_longer_traces_of_several_shapes(name, workload, k, host):
    trace = small_trace(workload, 100 * k + host, 300, k=k)
    assert compare(name, trace, device=2500, host=host) > 0
