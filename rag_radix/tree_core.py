"""The tree's nodes, and what inserting, splitting and copying does to their statistics."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from rag_radix.component import KnowledgeComponent
from rag_radix.policies.base import Rank, TierName
from rag_radix.sglang_compat import (
    ComponentType,
    DriveHostEvictionResult,
    InsertPhase,
    InsertResult,
    InsertWalkState,
    StorageMedium,
    UnifiedTreeCore,
    UnifiedTreeNode,
)
from rag_radix.statistics import DocumentKey, NodeStatistics
from rag_radix.tree_observer import TreeObserver

_FULL = ComponentType.FULL
_UNRANKED = Rank(0.0, 0.0)


class Occurrence(NamedTuple):
    """A document that ends where its node ends, and begins `tokens` before."""

    document: DocumentKey
    tokens: int


class DocumentNode(UnifiedTreeNode):
    """A run of tokens at its place in the tree: a document, a part of one, or a tail.

    A document occurrence is a chain of nodes, since documents that begin alike share a head
    and chunked prefill inserts piece by piece; only the chain's last node names it.

    Attributes:
        statistics: Use of this node.
        occurrences: Documents that end here; several, the last named kept, when ids differ but
            tokens agree.
        is_tail: No document has ended here or below: a question, an output, an unannotated
            prompt. Once text has become part of a document's path it stays so.
        matched: A later request has used the node or built on it.
        host_copies: Copies to host made of this node's KV since it was inserted.
        host_reclaims: Times its host copy was given up while it was on the device.
        ranks: By `TierName`.
        offered: By `TierName`, the rank of the tier's live heap entry, if any.
        unmarked_documents: Documents that lie here, in part or whole, and had no node at their
            end when this was noted: those beyond `max_depth`, those within a page, and those of
            which only a part was computed.
        names_forgotten: Whether more documents end here than `occurrences` keeps.
        on_device: Whether it counts among its parent's `device_children`.
        device_children: Children whose KV is on the device.
    """

    def __init__(self, tree_components: Any, priority: int = 0) -> None:
        super().__init__(tree_components, priority)
        self.statistics = NodeStatistics()
        self.occurrences: tuple[Occurrence, ...] = ()
        self.is_tail = True
        self.matched = False
        self.host_copies = 0
        self.host_reclaims = 0
        self.ranks = [_UNRANKED] * len(TierName)
        self.offered: list[Rank | None] = [None] * len(TierName)
        self.unmarked_documents: tuple[DocumentKey, ...] = ()
        self.names_forgotten = False
        self.on_device = False
        self.device_children = 0


class KnowledgeTreeCore(UnifiedTreeCore):
    """SGLang's Python tree core with document nodes.

    Attributes:
        access_time: Logical time: retrievals served so far.
        swapped_out_nodes, swapped_out_tokens: Copied from device to host.
        loaded_back_tokens: Copied from host to device.
        splits: Nodes cut in two.
        observer: Hears of what changes cached prefixes.
    """

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        self._component: KnowledgeComponent = components[ComponentType.FULL]
        self._reclaims_duplicates = self._component.policy.reclaims_duplicates
        self.access_time = 0
        self.swapped_out_nodes = 0
        self.swapped_out_tokens = 0
        self.loaded_back_tokens = 0
        self.splits = 0
        self.observer = TreeObserver()
        self._cuts: Sequence[int] = ()
        self._above: DocumentNode | None = None
        self._above_tokens = 0
        super().__init__(params, components)

    def reset(self) -> None:
        self._component.reset_tiers(self.access_time)
        super().reset()
        self.observer.tree_reset()

    def advance(self) -> int:
        """One more retrieval is served: the new logical time."""
        self.access_time += 1
        for tier in self._component.tiers:
            tier.clock.now = self.access_time
        return self.access_time

    def is_registered(self, node: DocumentNode) -> bool:
        """Whether `node` is still part of the tree."""
        return node.id in self._node_arena

    def has_node(self, node_id: int) -> bool:
        """Whether a node with this id is still part of the tree; ids are never used again."""
        return node_id in self._node_arena

    def nodes(self) -> list[DocumentNode]:
        """All nodes but the root, parents before their children."""
        return [node for node in self._collect_all_nodes() if node is not self.root_node]

    def path_to(self, node_id: int) -> list[DocumentNode]:
        """Nodes from below the root to `node_id`, in prompt order."""
        path = []
        node = self.node_by_id(node_id)
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def split(self, node: DocumentNode, tokens: int) -> tuple[DocumentNode, Any]:
        """Cut `node` after `tokens`; return the new upper half and SGLang's action, if any.

        `node` keeps its id, locks and place at the bottom. Nothing is freed or copied.
        """
        return self._split_node(node.key, node, tokens)

    def is_reclaimable(self, node: DocumentNode) -> bool:
        """Whether the host copy of `node` can be given up because the device has its KV."""
        return self._can_reclaim_full_host_duplicate(node) and self.is_registered(node)

    def rank(self, node: DocumentNode) -> None:
        """Rank `node` by its present statistics and clocks, in every tier; on host once it has
        a copy there."""
        for tier in self._component.tiers:
            tier.clock.observe(node.statistics)
            if tier.name is not TierName.HOST or node.backuped:
                tier.rank(node)
        self.offer(node)

    def offer(self, node: DocumentNode) -> None:
        """Let `node` be a candidate at its present ranks wherever it may leave."""
        if node in self.evictable_device_leaves:
            self._component.device.offer(node)
        if node in self.evictable_host_leaves:
            self._component.host.offer(node)
        if self._reclaims_duplicates and self._can_reclaim_full_host_duplicate(node):
            self._component.duplicates.offer(node)

    # Control

    def hide(self, node: DocumentNode, key: Any) -> None:
        """Let no prompt find `node` and what is below it: from now on it has `key`, the same
        tokens in a namespace of its own."""
        children = node.parent.children
        del children[node.key.child_key(self.page_size)]
        node.key = key
        children[key.child_key(self.page_size)] = node

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

    # What happens to a node's statistics, and where SGLang lets us see it happen.

    def _new_node(self, priority: int = 0) -> DocumentNode:
        node = DocumentNode(self.component_types, priority)
        node.statistics.last_access = node.statistics.inserted_at = self.access_time
        self._register_node(node)
        return node

    # Inserting

    @contextmanager
    def inserting(self, cuts: Sequence[int], above: DocumentNode | None) -> Iterator[None]:
        """Within, inserts are a request's: what is new is cut at `cuts`, ascending prompt
        positions, and its walk begins below `above`, a node of its locked prefix."""
        self._cuts, self._above = cuts, above
        if above is not None:
            self._above_tokens = sum(len(node.key) for node in self.path_to(above.id))
        try:
            yield
        finally:
            self._cuts, self._above = (), None

    def begin_insert(self, params: Any) -> Any:
        """SGLang's, but the walk need not begin at the root: a request inserts three times,
        and to match its 8k tokens again each time is most of what that costs."""
        start = self._above_tokens
        if (
            self._above is None
            or not 0 < start <= len(params.key)
            or params.rotation_base is not None
            or params.track_adopted_ranges
        ):
            return super().begin_insert(params)
        self._ongoing_insert_walk_state = InsertWalkState(
            phase=InsertPhase.WALK,
            node=self._above,
            key=params.key[start:],
            value=params.value[start:],
            params=params,
            priority=params.priority or 0,
            result=InsertResult(prefix_len=0),
            total_prefix_length=start,
        )
        return self._advance_insert()

    def _add_new_node(
        self, parent: DocumentNode, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> DocumentNode:
        """SGLang's, but a chain of nodes when `key` is to be cut."""
        start = self._ongoing_insert_walk_state.total_prefix_length
        inner = [cut - start for cut in self._cuts if 0 < cut - start < len(key)]
        self.observer.node_added(parent, key.child_key(self.page_size))
        for first, last in pairwise((0, *inner, len(key))):
            parent = super()._add_new_node(
                parent, key[first:last], value[first:last], *args, **kwargs
            )
            parent.statistics.tokens = last - first
            self.rank(parent)
        return parent

    def insert_host(self, *args: Any, **kwargs: Any) -> Any:
        """SGLang's; a node that a storage backend brings comes in here."""
        result = super().insert_host(*args, **kwargs)
        if result.inserted_host_node is not None:
            node = self.node_by_id(result.inserted_host_node)
            if not node.statistics.tokens:
                self.observer.node_added(node.parent, node.key.child_key(self.page_size))
                node.statistics.tokens = len(node.key)
                self.rank(node)
        return result

    def _split_node(self, key: Any, child: DocumentNode, split_len: int) -> tuple[Any, Any]:
        """Both halves were used alike, so both keep all statistics; the lower half keeps the
        documents that end there."""
        upper, action = super()._split_node(key, child, split_len)
        upper.statistics = child.statistics.copy()
        upper.is_tail = child.is_tail
        upper.matched = child.matched
        upper.unmarked_documents = child.unmarked_documents
        upper.host_copies = child.host_copies
        upper.host_reclaims = child.host_reclaims
        upper.statistics.tokens = len(upper.key)
        child.statistics.tokens = len(child.key)
        # As of the last use: cutting a node is none.
        upper.ranks = list(child.ranks)
        self.offer(upper)
        self.splits += 1
        self.observer.node_split(upper, child)
        return upper, action

    # Leaves. SGLang looks at every child to tell a device leaf, on every unlock, and a prompt
    # template has one for each document it was ever filled with: children are counted here.

    def _update_evictable_leaf_sets(self, node: DocumentNode) -> None:
        on_device = node.component_data[_FULL].value is not None
        if on_device != node.on_device and node is not self.root_node:
            node.on_device = on_device
            node.parent.device_children += 1 if on_device else -1
            self.observer.node_changed(node)
        device, host = self.evictable_device_leaves, self.evictable_host_leaves
        if on_device:
            host.discard(node)
            is_leaf, leaves, tier = self._is_device_leaf(node), device, self._component.device
        else:
            device.discard(node)
            is_leaf, leaves, tier = self._is_host_leaf(node), host, self._component.host
        if is_leaf:
            leaves.add(node)
            tier.offer(node)
        else:
            leaves.discard(node)
        if self._reclaims_duplicates and self._can_reclaim_full_host_duplicate(node):
            self._component.duplicates.offer(node)

    def _remove_leaf_from_parent(self, node: DocumentNode) -> None:
        super()._remove_leaf_from_parent(node)
        node.parent.device_children -= node.on_device
        node.on_device = False
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

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        super().finish_write_through(node_ids, ack_id)
        for node_id in node_ids:
            self._update_evictable_leaf_sets(self.node_by_id(node_id))

    def _update_duplicate_tracking(self, node: DocumentNode) -> None:
        super()._update_duplicate_tracking(node)
        self.offer(node)

    def commit_backup(self, node_id: int, host_indices: Any, comp_xfers: Any) -> None:
        """A copy to host begins: the node enters the host tier at that tier's clock."""
        super().commit_backup(node_id, host_indices, comp_xfers)
        node = self.node_by_id(node_id)
        node.host_copies += 1
        self._component.host.rank(node)
        if self._reclaims_duplicates:
            self._component.device.rank(node)
        self.swapped_out_nodes += 1
        self.swapped_out_tokens += len(host_indices)

    def commit_load_back(
        self, node_id: int, device_indices: Any, kv_xfer: Any, comp_xfers: Any
    ) -> Any:
        """A copy to device begins: statistics stay, the host copy too."""
        self.loaded_back_tokens += len(device_indices)
        return super().commit_load_back(node_id, device_indices, kv_xfer, comp_xfers)

    def drive_host_eviction(self, component_type: Any, num_tokens: int) -> Any:
        """SGLang's, without its own way of reclaiming host copies of device-resident nodes:
        whether and in which order that happens is the component's."""
        result = DriveHostEvictionResult()
        self.components_by_type[component_type].drive_host_eviction(
            num_tokens,
            result.tracker,
            result.device_frees,
            result.host_frees,
            cache_actions=result.cache_actions,
        )
        return result
