"""A node's way between device and host: what that does to slots, sizes and counts.

SGLang's own steps return what they free sorted by component, to be freed at once. Ours return a
node's slots to the eviction walk, which frees those of all its victims together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rag_radix.node import DocumentNode
from rag_radix.sglang_compat import ComponentType, DriveHostEvictionResult, StorageMedium
from rag_radix.tree_leaves import LeafTracking

_FULL = ComponentType.FULL
# Held by a node whose copy to host has begun until its slots there are known.
SLOTS_TO_COME = torch.empty(0, dtype=torch.int64)


class TierMoves(LeafTracking):
    """A tree core whose nodes move between tiers.

    Attributes:
        swapped_out_nodes, swapped_out_tokens: Copied from device to host.
        loaded_back_tokens: Copied from host to device.
    """

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        self.swapped_out_nodes = 0
        self.swapped_out_tokens = 0
        self.loaded_back_tokens = 0
        super().__init__(params, components)

    # To host

    def begin_copy(self, node: DocumentNode) -> None:
        """`node` is being copied to host, to slots that `copies_to` will say."""
        node.component_data[_FULL].host_value = SLOTS_TO_COME
        node.write_through_pending_id = node.id
        self._count_copy(node)

    @staticmethod
    def copies_to(nodes: Sequence[DocumentNode], slots: torch.Tensor) -> None:
        """The copies of `nodes` that have begun go to `slots`, one after the other."""
        # Copies, since a view would keep all of them in memory.
        parts = torch.split_with_sizes_copy(slots, [node.statistics.tokens for node in nodes])
        for node, part in zip(nodes, parts, strict=True):
            node.component_data[_FULL].host_value = part

    def commit_backup(self, node_id: int, host_indices: Any, comp_xfers: Any) -> None:
        """SGLang's; a copy that it has begun by itself."""
        super().commit_backup(node_id, host_indices, comp_xfers)
        self._count_copy(self.node_by_id(node_id))

    def _count_copy(self, node: DocumentNode) -> None:
        """The node enters the host tier at that tier's clock."""
        node.host_copies += 1
        if node.host_copies > self.holdings.most_copies:
            self.holdings.most_copies = node.host_copies
        self._note_host(node)
        self._component.host.rank(node)
        if self._reclaims_duplicates:
            self._component.device.rank(node)
        self.swapped_out_nodes += 1
        self.swapped_out_tokens += node.statistics.tokens

    # From the device

    def leave_device(self, node: DocumentNode) -> torch.Tensor:
        """`node`, a device leaf with a host copy, stays on host only.

        Returns: The device slots that it had.
        """
        slots = self._take_device_slots(node)
        self._update_evictable_leaf_sets(node)
        self._lost_device_child(node.parent)
        return slots

    def drop(self, node: DocumentNode) -> torch.Tensor | None:
        """`node`, a device leaf that has no host copy and no children, leaves the tree.

        Returns: The device slots that it had; None when it is in use and stays.
        """
        data = node.component_data[_FULL]
        assert data.host_value is None, f"node {node.id} has a host copy"
        assert not node.children, f"node {node.id} is no leaf"
        if data.lock_ref > 0 or data.host_lock_ref > 0 or node.load_back_pending_id is not None:
            return None
        slots = self._take_device_slots(node)
        self.evictable_device_leaves.discard(node)
        self._remove_leaf_from_parent(node)
        self._lost_device_child(node.parent)
        return slots

    def _lost_device_child(self, parent: DocumentNode) -> None:
        # Most are what prompts begin with, which have many.
        if not parent.device_children:
            self._update_evictable_leaf_sets(parent)

    def _take_device_slots(self, node: DocumentNode) -> torch.Tensor:
        data = node.component_data[_FULL]
        slots: torch.Tensor = data.value
        data.value = None
        self.component_evictable_size_[_FULL] -= node.statistics.tokens
        self.kv_events.record_remove(node, medium=StorageMedium.GPU)
        return slots

    # To the device

    def commit_load_back(
        self, node_id: int, device_indices: Any, kv_xfer: Any, comp_xfers: Any
    ) -> Any:
        """A copy to device begins: statistics stay, the host copy too."""
        self.loaded_back_tokens += len(device_indices)
        return super().commit_load_back(node_id, device_indices, kv_xfer, comp_xfers)

    # From host

    def leave_host(self, node: DocumentNode) -> torch.Tensor:
        """`node`, a host leaf, leaves the tree.

        Returns: The host slots that it had.
        """
        assert node in self.evictable_host_leaves, f"node {node.id} is no host leaf"
        data = node.component_data[_FULL]
        slots: torch.Tensor = data.host_value
        data.host_value = None
        self.kv_events.record_remove(node, medium=StorageMedium.CPU)
        self.evictable_host_leaves.discard(node)
        self._remove_leaf_from_parent(node)
        if not node.parent.children:
            self._update_evictable_leaf_sets(node.parent)
        return slots

    def give_up_copy(self, node: DocumentNode) -> torch.Tensor:
        """`node` keeps only its device slots.

        Returns: The host slots that it had.
        """
        freed: dict[Any, list[torch.Tensor]] = {_FULL: []}
        self._release_full_host_duplicate(node, {_FULL: 0}, {}, freed, [])
        node.host_reclaims += 1
        self.holdings.given_up_copies += 1
        self._note_host(node)
        self.rank(node)
        return freed[_FULL][0]

    def drive_host_eviction(self, component_type: Any, num_tokens: int) -> Any:
        """SGLang's, without its own way of reclaiming host copies of device-resident nodes:
        whether and in which order that happens is the component's."""
        result = DriveHostEvictionResult()
        result.host_frees[_FULL] = self._component.evict_from_host(num_tokens)
        result.tracker[_FULL] = sum(len(slots) for slots in result.host_frees[_FULL])
        return result

    # From both

    @staticmethod
    def is_in_use(node: DocumentNode) -> bool:
        """Whether a request, a copy or a load needs the KV of `node`."""
        data = node.component_data[_FULL]
        return (
            data.lock_ref > 0
            or data.host_lock_ref > 0
            or node.write_through_pending_id is not None
            or node.load_back_pending_id is not None
        )

    def drop_unused(self, nodes: Sequence[DocumentNode], result: Any) -> list[DocumentNode]:
        """Drop those of `nodes`, parents before their children, that neither are in use nor
        have a node below that stays.

        Args:
            result: What that frees goes into SGLang's result.
        """
        dropped = []
        for node in reversed(nodes):
            if node.children or self.is_in_use(node):
                continue
            if node.on_device and node.backuped:
                self.kv_events.record_remove(node, medium=StorageMedium.CPU)
            self._release_all_component_layers(
                node,
                StorageMedium.GPU if node.on_device else StorageMedium.CPU,
                result.tracker,
                result.device_frees,
                result.host_frees,
                cache_actions=result.cache_actions,
            )
            self._remove_leaf_from_parent(node)
            self._update_evictable_leaf_sets(node.parent)
            dropped.append(node)
        return dropped
