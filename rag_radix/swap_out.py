"""How KV leaves the device: what is copied to host, when, and who waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rag_radix.component import HostVictims
from rag_radix.host_slots import HostSlots
from rag_radix.sglang_compat import BackupKV, ComponentType, DriveHostEvictionResult

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.tree_core import DocumentNode

_FULL = ComponentType.FULL
# Of the device tier: what may be locked by copies that were begun ahead of eviction.
_AHEAD_SHARE = 0.25


class SwapOut:
    """Makes room on the device, and copies to host at eviction or ahead of it.

    A victim leaves the device tier at once and its copy only begins; its slots are given
    back when the walk has found all victims and their copies, submitted as one, are done.
    """

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._leaving: list[Any] = []  # device slots that a copy still reads
        self._leaving_tokens = 0
        self.host_slots = HostSlots(tree)

    def make_room(self, tracker: dict[Any, int], tokens: int, available: int | None) -> None:
        """Evict device leaves, lowest priority first, until `available` slots are free or, if
        that is None, until `tokens` have left; until there is no more, if that isn't enough.

        Args:
            tracker: By component, the tokens that have left; added to.
        """
        wanted = (tokens, available)
        try:
            self._evict_leaves(tracker, *wanted)
            if self._locks() and not self._is_enough(tracker, *wanted):
                self._tree.wait_for_copies()
                self._evict_leaves(tracker, *wanted)
        finally:
            self.host_slots.give_back()
            self._settle()

    def _evict_leaves(self, tracker: dict[Any, int], tokens: int, available: int | None) -> None:
        tree, device = self._tree, self._tree.component.device
        declined = []
        while not self._is_enough(tracker, tokens, available):
            if (node := device.pop()) is None:
                break
            if tree.is_write_back and not node.backuped:
                self._evict(node, tracker)
            else:
                tree._evict_device_leaf(node.id, tracker)
            if node.evicted or not tree.tree_core.is_registered(node):
                device.record_eviction(node)
            else:
                declined.append(node)
        # Not before, or a walk that can't free them would never end.
        for node in declined:
            tree.tree_core.offer(node)

    def _is_enough(self, tracker: dict[Any, int], tokens: int, available: int | None) -> bool:
        if available is None:
            return tracker[_FULL] >= tokens
        free: int = self._tree.token_to_kv_pool_allocator.available_size()
        return free + self._leaving_tokens >= available

    def _evict(self, node: DocumentNode, tracker: dict[Any, int]) -> None:
        """Let `node`, a device leaf without a host copy, leave the device: copied when it is
        worth it and there is room, dropped with what hangs below it otherwise. It stays when
        something below is in use."""
        tree = self._tree
        if node.is_tail and not node.matched:
            tokens = len(node.key)
            if self._drop(node, tracker):
                tree.counters.dropped_tail_nodes += 1
                tree.counters.dropped_tail_tokens += tokens
        elif self._copy(node, ahead=False):
            result = tree.tree_core.demote(node.id)
            for slots in result.device_frees.values():
                self._leaving += slots
            self._leaving_tokens += len(node.key)
            result.device_frees.clear()
            tree._apply_eviction_result(result)
            tree._accumulate_tracker(tracker, result.tracker)
        else:
            self._drop(node, tracker)

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
        if not tree.settings.policy.admits(
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
        return bool(tree._execute_and_commit_kv_backup(action, write_back=not ahead))

    def _drop(self, node: DocumentNode, tracker: dict[Any, int]) -> bool:
        tree = self._tree
        if node.children:
            self._settle()  # a node below that is just being copied couldn't be dropped
        result = tree.tree_core.drop_subtree_no_host(node.id)
        tree._apply_eviction_result(result)
        tree._accumulate_tracker(tracker, result.tracker)
        return bool(result.is_dropped)

    def _settle(self) -> None:
        """Wait for the copies of this walk and give the slots they read back."""
        if self._leaving:
            self._tree.wait_for_copies()
            slots, self._leaving, self._leaving_tokens = self._leaving, [], 0
            self._tree.free_device_slots(slots)


def _subtree(node: DocumentNode) -> list[DocumentNode]:
    found = [node]
    for above in found:
        found += above.children.values()
    return found
