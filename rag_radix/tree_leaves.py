"""Which nodes may leave a tier: leaves, locks, and the heaps that offer them.

SGLang looks at every child of a node to tell a device leaf, at every unlock, and a prompt template
has one for each document it was ever filled with: children are counted here. Its walks serve trees
of several components and ask each of them at each node; ours has one.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from rag_radix.component import KnowledgeComponent
from rag_radix.holdings import Holdings
from rag_radix.namespaces import child_key_at
from rag_radix.node import DocumentNode
from rag_radix.policies.base import TierName
from rag_radix.sglang_compat import (
    ComponentType,
    DecLockRefResult,
    IncLockRefResult,
    StorageMedium,
    UnifiedTreeCore,
)
from rag_radix.tree_observer import TreeObserver

_FULL = ComponentType.FULL


class LeafTracking(UnifiedTreeCore):
    """SGLang's Python tree core, whose leaves are candidates of the component's tiers.

    Attributes:
        observer: Hears of what changes cached prefixes.
        holdings: What it holds.
    """

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        self._component: KnowledgeComponent = components[_FULL]
        self._reclaims_duplicates = self._component.policy.reclaims_duplicates
        self._uses_largest = self._component.policy.uses_largest
        self.observer = TreeObserver()
        self.holdings = Holdings()
        super().__init__(params, components)

    # Candidates

    def _can_reclaim_full_host_duplicate(self, node: DocumentNode) -> bool:
        # Most nodes that are asked about have no copy there.
        return (
            node.component_data[_FULL].host_value is not None
            and not node.keeps_host_copy
            and super()._can_reclaim_full_host_duplicate(node)
        )

    def is_reclaimable(self, node: DocumentNode) -> bool:
        """Whether the host copy of `node` can be given up because the device has its KV."""
        return self._can_reclaim_full_host_duplicate(node) and node.id in self._node_arena

    def rank(self, node: DocumentNode) -> None:
        """Rank `node` by its present statistics and clocks, in every tier; on host once it has
        a copy there."""
        if self._uses_largest:
            self._observe(node)
        on_host = node.backuped
        for tier in self._component.tiers:
            if on_host or tier.name is not TierName.HOST:
                tier.rank(node)
        self.offer(node)

    def _observe(self, node: DocumentNode) -> None:
        for tier in self._component.tiers:
            tier.clock.observe(node.statistics)

    def offer(self, node: DocumentNode) -> None:
        """Let `node` be a candidate at its present ranks wherever it may leave."""
        if node in self.evictable_device_leaves:
            self._component.device.offer(node)
        elif node in self.evictable_host_leaves:
            self._component.host.offer(node)
        if self._reclaims_duplicates and self._can_reclaim_full_host_duplicate(node):
            self._component.duplicates.offer(node)

    # Leaves

    def _update_evictable_leaf_sets(self, node: DocumentNode) -> None:
        if node is self.root_node:
            return
        data = node.component_data[_FULL]
        on_device = data.value is not None
        if on_device != node.on_device:
            node.on_device = on_device
            node.parent.device_children += 1 if on_device else -1
            (self.evictable_host_leaves if on_device else self.evictable_device_leaves).discard(
                node
            )
            self.observer.node_changed(node)
            self.holdings.moved(node, TierName.DEVICE, on_device)
        if (data.host_value is not None) != node.on_host:
            self._note_host(node)
        if on_device:
            is_leaf = data.lock_ref == 0 and node.device_children == 0
            leaves, tier = self.evictable_device_leaves, self._component.device
        else:
            is_leaf = not node.children and self.is_host_leaf_without(node, ())
            leaves, tier = self.evictable_host_leaves, self._component.host
        if is_leaf:
            leaves.add(node)
            tier.offer(node)
        else:
            leaves.discard(node)
        if self._reclaims_duplicates and self._can_reclaim_full_host_duplicate(node):
            self._component.duplicates.offer(node)

    def _note_host(self, node: DocumentNode) -> None:
        """Whether `node` has a host copy may have changed."""
        on_host = node.component_data[_FULL].host_value is not None
        if on_host != node.on_host:
            node.on_host = on_host
            self.holdings.moved(node, TierName.HOST, on_host)

    def _register_node(self, node: DocumentNode) -> None:
        super()._register_node(node)
        if node.is_tail:
            self.holdings.tails += 1

    def _remove_leaf_from_parent(self, node: DocumentNode) -> None:
        parent = node.parent
        del parent.children[child_key_at(node.key, 0, self.page_size)]
        parent.device_children -= node.on_device
        if node.on_device:
            self.holdings.moved(node, TierName.DEVICE, False)
        if node.on_host:
            self.holdings.moved(node, TierName.HOST, False)
        self.holdings.tails -= node.is_tail
        node.on_device = node.on_host = False
        if node.mark is not None:
            node.mark.left()
        self.full_host_duplicates.pop(node.id, None)
        self._unregister_node(node)
        self.observer.node_changed(node)

    def _is_device_leaf(self, node: DocumentNode) -> bool:
        data = node.component_data[_FULL]
        return (
            data.value is not None
            and data.lock_ref == 0
            and node.device_children == 0
            and node is not self.root_node
        )

    def _is_host_leaf(self, node: DocumentNode) -> bool:
        return not node.children and self.is_host_leaf_without(node, ())

    def is_host_leaf_without(self, node: DocumentNode, chosen: Container[int]) -> bool:
        """Whether `node` is a host leaf once the nodes with ids in `chosen` are gone."""
        data = node.component_data[_FULL]
        return (
            data.value is None
            and data.host_value is not None
            and data.lock_ref == data.host_lock_ref == 0
            # A victim leaves the device tier before its copy is done, and then waits for it.
            and node.write_through_pending_id is None
            and node is not self.root_node
            and (not node.children or all(c.id in chosen for c in node.children.values()))
        )

    def _update_duplicate_tracking(self, node: DocumentNode) -> None:
        super()._update_duplicate_tracking(node)
        self.offer(node)

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        for node_id in node_ids:
            node = self.node_by_id(node_id)
            if node.write_through_pending_id == ack_id:
                node.write_through_pending_id = None
                super()._update_duplicate_tracking(node)
            self.kv_events.record_store(node, medium=StorageMedium.CPU)
            self._update_evictable_leaf_sets(node)

    # Locks

    def inc_lock_ref(self, node_id: int, skip_lock_components: Any = ()) -> IncLockRefResult:
        node = above = self.node_by_id(node_id)
        delta = 0
        while above is not self.root_node:
            data = above.component_data[_FULL]
            if data.lock_ref == 0 and data.value is not None:
                delta += above.statistics.tokens
                self.evictable_device_leaves.discard(above)
            data.lock_ref += 1
            above = above.parent
        self._move_to_protected(delta)
        self.evictable_host_leaves.discard(node)
        return IncLockRefResult(
            delta=delta, node_id=node_id, skipped_lock_components=tuple(skip_lock_components)
        )

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> DecLockRefResult:
        node = above = self.node_by_id(node_id)
        self._assert_receipt_anchor(node, params)
        freed = 0
        while above is not self.root_node:
            data = above.component_data[_FULL]
            assert data.lock_ref > 0, f"node {above.id} is unlocked, but isn't locked"
            data.lock_ref -= 1
            if data.lock_ref == 0 and data.value is not None:
                freed += above.statistics.tokens
                if above.device_children == 0 and above is not node:
                    self._update_evictable_leaf_sets(above)
            above = above.parent
        self._move_to_protected(-freed)
        self._update_evictable_leaf_sets(node)
        return DecLockRefResult()

    def lock_below(self, node: DocumentNode) -> None:
        """Lock `node`, whose parent the caller has locked already."""
        data = node.component_data[_FULL]
        if data.lock_ref == 0:
            self._move_to_protected(node.statistics.tokens)
            self.evictable_device_leaves.discard(node)
        data.lock_ref += 1

    def _move_to_protected(self, tokens: int) -> None:
        self.component_evictable_size_[_FULL] -= tokens
        self.component_protected_size_[_FULL] += tokens
