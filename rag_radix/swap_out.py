"""How KV leaves the device: what is copied to host, when, and who waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from rag_radix.component import HostVictims
from rag_radix.host_slots import HostSlots
from rag_radix.policies.base import ReplacementPolicy
from rag_radix.sglang_compat import (
    BackupKV,
    CacheOperation,
    ComponentType,
    FreeComponentDeviceSlot,
    OngoingCopy,
)

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode

logger = logging.getLogger(__name__)

_FULL = ComponentType.FULL
# Between two looks for what a storage backend has written.
_WRITE_POLL_S = 0.001
# Of the device tier: what may be locked by copies that were begun ahead of eviction.
_AHEAD_SHARE = 0.25
# Many prompts begin with a node that so many retrievals have read, one in so many at least.
_HOT_USES = 8
_HOT_PARTS = 32


class SwapOut:
    """Makes room on the device, and copies to host at eviction or ahead of it.

    A victim leaves the device tier at once and its copy only begins; the slots of all victims
    are given back when the walk has found them and their copies, submitted as one, are done.
    """

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._leaving: list[torch.Tensor] = []  # device slots that a copy may still read
        self._begun: list[tuple[DocumentNode, torch.Tensor]] = []  # copies and what they read
        self._waits = False  # for copies that SGLang has begun in this walk
        self.host_slots = HostSlots(tree)
        # Whether the policy ever refuses a copy.
        self._is_choosy = type(tree.settings.policy).admits is not ReplacementPolicy.admits

    def make_room(self, evicted: dict[Any, int], tokens: int) -> None:
        """Evict device leaves, lowest priority first, until `tokens` have left the device or
        there is none left.

        SGLang admits requests against all leaves and ends when their slots can't be had, so what
        host locks keep a leaf from leaving has to end in the last resort.

        Args:
            evicted: SGLang's count by component, added to.
        """
        try:
            self._evict_leaves(evicted, tokens)
            if evicted[_FULL] < tokens and self._locks():
                self._submit()
                self._tree.wait_for_copies()
                self._evict_leaves(evicted, tokens)
            while evicted[_FULL] < tokens and self._unlock_leaves():
                self._evict_leaves(evicted, tokens)
        finally:
            self._settle()
            self.host_slots.give_back()

    def _evict_leaves(self, evicted: dict[Any, int], tokens: int) -> None:
        device = self._tree.component.device
        declined = []
        while evicted[_FULL] < tokens and (node := device.pop()) is not None:
            if freed := self._evict(node):
                evicted[_FULL] += freed
                device.record_eviction(node)
            else:
                declined.append(node)
        # Not before, or a walk that can't free them would never end.
        for node in declined:
            device.offer(node)

    def _evict(self, node: DocumentNode) -> int:
        """Let `node`, a device leaf, leave the device: kept on host if it is there or if the
        copy is worth it and there is room, dropped with what hangs below it otherwise. It stays
        when it or something below is locked on host and there is no room for it.

        Returns: The device tokens that are free then.
        """
        tree = self._tree
        is_unused_tail = node.is_tail and not node.matched
        if node.backuped or (
            tree.is_write_back and not is_unused_tail and self._copy(node, ahead=False)
        ):
            return self._leave(node)
        if freed := self._drop_all(node) if node.children else self._drop(node):
            if is_unused_tail:
                tree.counters.dropped_tail_nodes += 1
                tree.counters.dropped_tail_tokens += node.statistics.tokens
            return freed
        # What a prefetch from storage hangs on can't be dropped, but it can be copied.
        if tree.is_write_back and self._copy(node, ahead=False, is_needed=True):
            return self._leave(node)
        return 0

    def _leave(self, node: DocumentNode) -> int:
        """Let `node` stay on host only."""
        self._leaving.append(self._tree.tree_core.leave_device(node))
        return node.statistics.tokens

    def _drop(self, node: DocumentNode) -> int:
        slots = self._tree.tree_core.drop(node)
        if slots is None:
            return 0
        self._leaving.append(slots)
        return node.statistics.tokens

    def _drop_all(self, node: DocumentNode) -> int:
        """Drop `node` and what hangs below it on host."""
        tree = self._tree
        if self._begun or self._waits:
            self._settle()  # a node below that is just being copied couldn't be dropped
        result = tree.tree_core.drop_subtree_no_host(node.id)
        self._leaving += result.device_frees.pop(_FULL, ())
        tree._apply_eviction_result(result)
        tokens: int = result.tracker.get(_FULL, 0)
        return tokens

    def _unlock_leaves(self) -> bool:
        """End something that locks, on host, device leaves that couldn't be evicted, or what hangs
        below them: what costs least first.

        Returns: Whether there was something of the kind.
        """
        tree, leaves = self._tree, self._tree.tree_core.evictable_device_leaves
        nodes = [node for leaf in leaves for node in _subtree(leaf)]
        if not any(node.component_data[_FULL].host_lock_ref for node in nodes):
            return False
        ids = {node.id for node in nodes}
        anchored = [
            request
            for request, prefetch in tree.ongoing_prefetch.items()
            if prefetch.anchor_node_id in ids
        ]
        if anchored:
            for request in anchored:
                tree.release_aborted_request(request)  # it is computed instead
            return True
        if any(node_id in ids for node_id, _ in tree.ongoing_backup.values()):
            time.sleep(_WRITE_POLL_S)
            tree.drain_storage_control_queues()
            return True
        given_up = tree.control.give_up_places(ids)
        if given_up:
            logger.warning("Pins: device and host are full; given up on host: %d places", given_up)
        return given_up > 0

    def copy_ahead(self, path: Iterable[DocumentNode]) -> None:
        """Begin to copy what of `path` is to have a host copy before it leaves the device, upper
        nodes first: what prompts begin with, what storage wants, or all that isn't an unused
        tail."""
        tree = self._tree
        mode = tree.settings.swap_out
        if mode == "on_evict" and not tree.enable_storage:
            return
        limit = _AHEAD_SHARE * tree.token_to_kv_pool_allocator.size
        try:
            for node in path:
                node.keeps_host_copy = self._many_begin_with(node)
                if node.backuped or (node.is_tail and not node.matched):
                    continue
                if not (mode == "eager" or node.keeps_host_copy or tree.storing.wants(node)):
                    continue
                tokens = node.statistics.tokens
                if tokens > limit:
                    continue  # it never fits, and may not keep what is behind it from being copied
                if self._tokens_in_flight() + tokens > limit:
                    return
                self._copy(node, ahead=True)
        finally:
            self._submit()
            self.host_slots.give_back()

    def _many_begin_with(self, node: DocumentNode) -> bool:
        """Whether so large a part of all prompts since it came begin with `node` and go on that
        there can't be many of the kind."""
        statistics = node.statistics
        if statistics.frequency < _HOT_USES or not node.children:
            return False
        time = self._tree.tree_core.access_time - statistics.inserted_at
        return statistics.frequency * _HOT_PARTS >= time

    def _locks(self) -> bool:
        """Whether copies that were begun ahead of eviction lock what they read."""
        copies = self._tree.ongoing_write_through.values()
        return any(copy.lock_params is not None for copy in copies)

    def _tokens_in_flight(self) -> int:
        core = self._tree.tree_core
        return sum(
            core.node_by_id(node_id).statistics.tokens
            for copy in self._tree.ongoing_write_through.values()
            for node_id in copy.publish_node_ids
        )

    def _copy(self, node: DocumentNode, *, ahead: bool, is_needed: bool = False) -> bool:
        """Begin to copy `node`; False when there is no room or, unless it `is_needed`, it isn't
        worth it."""
        tree, component, host_slots = self._tree, self._tree.component, self.host_slots
        tokens = node.statistics.tokens
        if tokens > host_slots.capacity_tokens:
            return False
        missing = tokens - host_slots.available_tokens
        victims = component.choose_host_victims(missing) if missing > 0 else HostVictims()
        if victims is None:
            return False
        if self._is_choosy and not is_needed and not self._is_admitted(node, victims):
            component.keep(victims)
            if not ahead:  # it is asked again and again while it stays on the device
                tree.counters.refused_nodes += 1
                tree.counters.refused_tokens += tokens
            return False
        are_alike = host_slots.are_alike
        if missing > 0:
            freed = component.evict_victims(victims, missing)
            if are_alike:
                host_slots.keep(freed)
            else:
                component.free_host_values(freed)
        if are_alike:
            self._begin(node, ahead=ahead)
            return True
        tree._execute_and_commit_kv_backup(BackupKV(node_ids=[node.id]), write_back=not ahead)
        self._waits |= not ahead
        return bool(node.backuped)

    def _is_admitted(self, node: DocumentNode, victims: HostVictims) -> bool:
        # What is locked there, a pinned document's prefix, has no choice.
        if node.keeps_host_copy or node.component_data[_FULL].host_lock_ref:
            return True
        return self._tree.settings.policy.admits(
            [kept.statistics for kept in _subtree(node)],
            [leaf.statistics for leaf in victims.leaves],
            self._tree.component.host.clock,
        )

    def _begin(self, node: DocumentNode, *, ahead: bool) -> None:
        tree = self._tree
        slots = node.component_data[_FULL].value
        tree.tree_core.begin_copy(node)
        lock = tree.inc_lock_ref(node.id).to_dec_params() if ahead else None
        tree.ongoing_write_through[node.id] = OngoingCopy(node.id, lock, [node.id])
        self.host_slots.promise(node.statistics.tokens)
        self._begun.append((node, slots))

    def copies_failed(self, nodes: list[DocumentNode]) -> None:
        """The host slots of `nodes` don't hold their KV. Who has it on the device still keeps it
        there; others leave the tree with what hangs below them."""
        tree, core = self._tree, self._tree.tree_core
        lost: list[DocumentNode] = []
        for node in nodes:
            node.keeps_host_copy = False
            if core.is_reclaimable(node):
                tree.component.free_host_values([core.give_up_copy(node)])
            else:
                lost.append(node)
        tree.control.lost(lost)

    def _submit(self) -> None:
        """Queue the copies that were begun, as one."""
        if self._begun:
            nodes, device_slots = zip(*self._begun, strict=True)
            self._begun = []
            slots = self.host_slots.take()
            self._tree.tree_core.copies_to(nodes, slots)
            copy = CacheOperation(slots, torch.cat(device_slots), nodes[0].id)
            copy.node_ids = [node.id for node in nodes]
            self._tree.cache_controller.write_queue.append(copy)

    def _settle(self) -> None:
        """Wait for the copies of this walk and give the slots of its victims back."""
        if self._begun or self._waits:
            self._submit()
            self._tree.wait_for_copies()
        slots, self._leaving, self._waits = self._leaving, [], False
        if slots:
            self._tree._apply_cache_action(
                FreeComponentDeviceSlot([torch.cat(slots)], component_type=_FULL)
            )


def _subtree(node: DocumentNode) -> list[DocumentNode]:
    found = [node]
    for above in found:
        found += above.children.values()
    return found
