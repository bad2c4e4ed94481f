"""The tree's invariants, checked from its nodes."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from rag_radix.policies.base import TierName
from rag_radix.sglang_compat import ComponentType

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode


def check_integrity(tree: KnowledgeTree) -> None:
    """Raise AssertionError unless tiers, tree and statistics agree. O(nodes).

    Slots are disjoint, and free + cached slots are the capacity of each tier: exactly while
    no request holds slots of its own, at most otherwise. A node on the device has its parent
    there, a node on host has its parent in either. A node was copied to host at most once,
    and once more for each time that its copy was given up. No node was read more often than
    its parent, and a document begins where a node does. What is counted as nodes change is
    what there is.
    """
    tree.sanity_check()
    nodes = tree.tree_core.nodes()
    device_slots, host_slots = [], []
    for node in nodes:
        data = node.component_data[ComponentType.FULL]
        if data.value is not None:
            assert len(data.value) == len(node.key), f"node {node.id}: slots do not fit its key"
            device_slots.append(data.value)
        if data.host_value is not None:
            assert len(data.host_value) == len(node.key), f"node {node.id}: host slots don't fit"
            host_slots.append(data.host_value)
        _check_node(tree, node)
    _check_holdings(tree, nodes)

    device_tokens = _count_disjoint(device_slots, "device")
    assert device_tokens == tree.evictable_size() + tree.protected_size(), (
        f"device tier: {device_tokens} tokens in nodes, {tree.evictable_size()} evictable + "
        f"{tree.protected_size()} protected"
    )
    allocator = tree.token_to_kv_pool_allocator
    capacity = allocator.size // tree.page_size * tree.page_size
    accounted = allocator.available_size() + device_tokens
    # A request holds a row before anything of it is in the tree.
    rows = tree.req_to_token_pool
    idle = rows.available_size() == rows.size
    assert accounted == capacity if idle else accounted <= capacity, (
        f"device tier: {allocator.available_size()} free + {device_tokens} cached tokens "
        f"of {capacity}"
    )
    if tree.cache_controller is not None:
        host_tokens = _count_disjoint(host_slots, "host")
        pool = tree.cache_controller.mem_pool_host
        free = pool.available_size() + tree.swap_out.host_slots.kept_tokens
        accounted = free + host_tokens
        # What is being read from storage has slots before it is in the tree.
        assert accounted == pool.logical_size or (
            tree.enable_storage and accounted < pool.logical_size
        ), f"host tier: {free} free + {host_tokens} cached tokens of {pool.logical_size}"


def _check_holdings(tree: KnowledgeTree, nodes: list[DocumentNode]) -> None:
    core = tree.tree_core
    holdings = core.holdings
    assert core.node_count == len(nodes), f"{core.node_count} nodes counted, {len(nodes)} there"
    tails = sum(node.is_tail for node in nodes)
    assert holdings.tails == tails, f"{holdings.tails} tails counted, {tails} there"
    assert holdings.most_copies >= max((node.host_copies for node in nodes), default=0)
    for tier in (TierName.DEVICE, TierName.HOST):
        there = Counter(
            occurrence.document
            for node in nodes
            for occurrence in node.occurrences
            if (node.on_device if tier is TierName.DEVICE else node.backuped)
        )
        assert holdings.places(tier) == there, f"documents counted on {tier.name} aren't there"


def _check_node(tree: KnowledgeTree, node: DocumentNode) -> None:
    root, parent = tree.tree_core.root_node, node.parent
    copies, reclaims = node.host_copies, node.host_reclaims
    assert copies <= 1 + reclaims, f"node {node.id}: copied {copies} times, {reclaims} given up"
    assert not node.backuped or copies == 1 + reclaims or tree.enable_storage, (
        f"node {node.id}: on host without a counted copy"
    )
    statistics = node.statistics
    # One for each retrieval that computed it; before the first, it may have had a cost alone.
    assert statistics.cost_samples <= statistics.frequency + 1, f"node {node.id}: cost samples"
    assert statistics.last_access <= tree.tree_core.access_time, f"node {node.id}: access time"
    assert not (node.occurrences and node.is_tail), f"node {node.id}: a document and a tail"
    if parent is not root:
        assert not parent.is_tail or node.is_tail, f"node {node.id}: document below a tail"
        assert parent.statistics.frequency >= statistics.frequency, (
            f"node {node.id}: read more often than its parent"
        )
    if node.occurrences:
        lengths = [len(above.key) for above in reversed(tree.tree_core.path_to(node.id))]
        chains = set(accumulate(lengths))
        for occurrence in node.occurrences:
            assert occurrence.tokens in chains, f"node {node.id}: {occurrence} begins inside a node"
    assert statistics.tokens == len(node.key), f"node {node.id}: tokens in its statistics"
    on_device = node.component_data[ComponentType.FULL].value is not None
    below = sum(child.on_device for child in node.children.values())
    assert (node.on_device, node.device_children) == (on_device, below), (
        f"node {node.id}: {node.device_children} children counted on the device, {below} are"
    )
    core, component = tree.tree_core, tree.component
    for tier, is_candidate in (
        (component.device, node in core.evictable_device_leaves),
        (component.host, node in core.evictable_host_leaves),
    ):
        assert not is_candidate or node.offered[tier.name] == node.ranks[tier.name], (
            f"node {node.id}: an evictable leaf that the {tier.name.name} heap doesn't offer"
        )


def _count_disjoint(slots: list[torch.Tensor], tier: str) -> int:
    if not slots:
        return 0
    joined = torch.cat([value.cpu() for value in slots])
    assert len(joined.unique()) == len(joined), f"{tier} tier: two nodes share a slot"
    return len(joined)
