"""How KV leaves the device: what is copied to host, when, and who waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rag_radix.component import HostVictims
from rag_radix.host_slots import HostSlots
from rag_radix.sglang_compat import (
    BackupKV,
    ComponentType,
    DriveHostEvictionResult,
    FreeComponentDeviceSlot,
)

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.tree_core import DocumentNode

_FULL = ComponentType.FULL
# Of the device tier: what may be locked by copies that were begun ahead of eviction.
_AHEAD_SHARE = 0.25


class SwapOut:
    """Makes room on the device, and copies to host at eviction or ahead of it.

    A victim leaves the device tier at once and its copy only begins; the slots of all victims
    are given back when the walk has found them and their copies, submitted as one, are done.
    """

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._leaving: list[torch.Tensor] = []  # device slots that a copy may still read
        self._copies = 0  # begun in this walk
        self.host_slots = HostSlots(tree)

    def make_room(self, evicted: dict[Any, int], tokens: int) -> None:
        """Evict device leaves, lowest priority first, until `tokens` have left the device or
        there is none that can.

        Args:
            evicted: SGLang's count by component, added to.
        """
        try:
            self._evict_leaves(evicted, tokens)
            if evicted[_FULL] < tokens and self._locks():
                self._tree.wait_for_copies()
                self._evict_leaves(evicted, tokens)
        finally:
            self.host_slots.give_back()
            self._settle()

    def _evict_leaves(self, evicted: dict[Any, int], tokens: int) -> None:
        tree, device = self._tree, self._tree.component.device
        declined = []
        while evicted[_FULL] < tokens and (node := device.pop()) is not None:
            result = self._evict(node)
            self._leaving += result.device_frees.pop(_FULL, ())
            tree._apply_eviction_result(result)
            if result.tracker:
                evicted[_FULL] += result.tracker[_FULL]
                device.record_eviction(node)
            else:
                declined.append(node)
        # Not before, or a walk that can't free them would never end.
        for node in declined:
            device.offer(node)

    def _evict(self, node: DocumentNode) -> Any:
        """Let `node`, a device leaf, leave the device: kept on host if it is there or if the
        copy is worth it and there is room, dropped with what hangs below it otherwise. It stays
        when something below is in use.

        Returns: What is free then, as SGLang's result.
        """
        tree = self._tree
        is_unused_tail = node.is_tail and not node.matched
        if node.backuped or (
            tree.is_write_back and not is_unused_tail and self._copy(node, ahead=False)
        ):
            return tree.tree_core.demote(node.id)
        if node.children and self._copies:
            self._settle()  # a node below that is just being copied couldn't be dropped
        result = tree.tree_core.drop_subtree_no_host(node.id)
        if result.is_dropped and is_unused_tail:
            tree.counters.dropped_tail_nodes += 1
            tree.counters.dropped_tail_tokens += len(node.key)
        return result

    def copy_ahead(self, path: list[DocumentNode]) -> None:
        """Begin to copy the documents of `path` that have no host copy, parents first, and of
        the tails those that were used again."""
        limit = _AHEAD_SHARE * self._tree.token_to_kv_pool_allocator.size
        try:
            for node in path:
                if node.backuped or (node.is_tail and not node.matched):
                    continue
                if self._tokens_in_flight() + len(node.key) > limit:
                    return
                self._copy(node, ahead=True)
        finally:
            self.host_slots.give_back()

    def _locks(self) -> bool:
        """Whether copies that were begun ahead of eviction lock what they read."""
        copies = self._tree.ongoing_write_through.values()
        return any(copy.lock_params is not None for copy in copies)

    def _tokens_in_flight(self) -> int:
        core = self._tree.tree_core
        return sum(
            len(core.node_by_id(node_id).key)
            for copy in self._tree.ongoing_write_through.values()
            for node_id in copy.publish_node_ids
        )

    def _copy(self, node: DocumentNode, *, ahead: bool) -> bool:
        """Begin to copy `node`; False when it isn't worth it or there is no room."""
        tree, component = self._tree, self._tree.component
        tokens = len(node.key)
        if tokens > self.host_slots.capacity_tokens:
            return False
        missing = tokens - self.host_slots.available_tokens
        victims = component.choose_host_victims(missing) if missing > 0 else HostVictims()
        if victims is None:
            return False
        # What is locked there, a pinned document's prefix, has no choice.
        if not node.component_data[_FULL].host_lock_ref and not tree.settings.policy.admits(
            [kept.statistics for kept in _subtree(node)],
            [leaf.statistics for leaf in victims.leaves],
            component.host.clock,
        ):
            component.keep(victims)
            tree.counters.refused_nodes += 1
            tree.counters.refused_tokens += tokens
            return False
        if missing > 0:
            result = DriveHostEvictionResult()
            component.evict_victims(victims, missing, result)
            self.host_slots.keep(result.host_frees)
            tree._apply_eviction_result(result)
        action = BackupKV(node_ids=[node.id])
        tree._execute_and_commit_kv_backup(action, write_back=not ahead)
        self._copies += not ahead
        return bool(node.backuped)

    def _settle(self) -> None:
        """Wait for the copies of this walk and give the slots of its victims back."""
        if self._copies:
            self._tree.wait_for_copies()
        slots, self._leaving, self._copies = self._leaving, [], 0
        if slots:
            self._tree._apply_cache_action(
                FreeComponentDeviceSlot([torch.cat(slots)], component_type=_FULL)
            )


def _subtree(node: DocumentNode) -> list[DocumentNode]:
    found = [node]
    for above in found:
        found += above.children.values()
    return found
