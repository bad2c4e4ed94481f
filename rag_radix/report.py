"""`GET /rag/stats`: what is cached and what the tree has done."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rag_radix.environment import CHECK_INTEGRITY
from rag_radix.policies.base import TierName
from rag_radix.sglang_compat import device_bytes_per_token

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree


def report(tree: KnowledgeTree) -> dict[str, Any]:
    """Plain JSON values; counts are since start, tiers as of now.

    With RAG_RADIX_CHECK_INTEGRITY=1 the tree's invariants are checked as well, and
    `integrity` is "ok" or says what is broken.
    """
    core, component, counters = tree.tree_core, tree.component, tree.counters
    holdings = core.holdings
    allocator, host = tree.token_to_kv_pool_allocator, tree.cache_controller
    bytes_per_token = device_bytes_per_token(tree)
    state: dict[str, Any] = {
        "tree": type(tree).__name__,
        "policy": tree.settings.policy.name,
        "policy_settings": asdict(tree.settings.policy),  # type: ignore[call-overload]
        "prefill_cost": tree.settings.cost_source,
        "swap_out": tree.settings.swap_out,
        "max_depth": tree.settings.max_depth,
        "page_size": tree.page_size,
        "nodes": core.node_count,
        "tail_nodes": holdings.tails,
        "known_documents": len(tree.document_frequencies),
        "known_paths": len(tree.histories),
        "device": {
            "capacity_tokens": allocator.size,
            "capacity_bytes": allocator.size * bytes_per_token,
            "cached_tokens": tree.evictable_size() + tree.protected_size(),
            "locked_tokens": tree.protected_size(),
            "free_tokens": allocator.available_size(),
            "documents": holdings.documents(TierName.DEVICE),
            "clock": component.device.clock.evicted,
            "evicted_nodes": component.device.evicted_nodes,
            "evicted_tokens": component.device.evicted_tokens,
        },
        "host": None,
        "swap": {
            "out_nodes": core.swapped_out_nodes,
            "out_tokens": core.swapped_out_tokens,
            "out_bytes": core.swapped_out_tokens * bytes_per_token,
            "in_tokens": core.loaded_back_tokens,
            "in_bytes": core.loaded_back_tokens * bytes_per_token,
            "failed_nodes": tree.copy_failures.nodes,
            "most_copies_of_a_node": holdings.most_copies,
            "given_up_copies": holdings.given_up_copies,
        },
        "requests": asdict(counters),
        "speculation": {
            **asdict(tree.speculations.counters),
            "in_flight": len(tree.speculations.in_flight),
            "max_prefill_bs": tree.settings.max_prefill_bs,
        },
        "control": tree.control.report(),
        "storage": tree.storing.report(),
        "splits": core.splits,
    }
    if host is not None:
        pool = host.mem_pool_host
        free = tree.swap_out.host_slots.available_tokens
        state["host"] = {
            "capacity_tokens": pool.logical_size,
            "capacity_bytes": pool.logical_size * pool.size_per_token,
            "cached_tokens": pool.logical_size - free,
            "free_tokens": free,
            "documents": holdings.documents(TierName.HOST),
            "clock": component.host.clock.evicted,
            "evicted_nodes": component.host.evicted_nodes,
            "evicted_tokens": component.host.evicted_tokens,
        }
    if CHECK_INTEGRITY.is_set():
        try:
            tree.check_integrity()
            state["integrity"] = "ok"
        except AssertionError as error:
            state["integrity"] = str(error)
    return state
