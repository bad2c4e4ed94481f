"""Which leaf leaves which tier next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from rag_radix.policies import ReplacementPolicy
from rag_radix.sglang_compat import ComponentType, FullComponent
from rag_radix.statistics import NodeStatistics

if TYPE_CHECKING:
    from rag_radix.tree_core import DocumentNode

_STALE_ENTRIES_KEPT = 1024


class TierName(IntEnum):
    """Index of a tier in a node's `priorities`."""

    DEVICE = 0
    HOST = 1


class Tier:
    """Eviction order of one memory tier: a clock and a persistent, lazily updated heap.

    An entry counts only while its node is evictable and its priority still the node's, so a
    change costs one push and an eviction O(log n), never a scan of the leaves.

    Attributes:
        clock: Highest priority evicted from this tier so far.
        evicted_nodes: Nodes that left this tier.
        evicted_tokens: Their tokens.
    """

    def __init__(
        self,
        name: TierName,
        policy: ReplacementPolicy,
        is_evictable: Callable[[DocumentNode], bool],
    ) -> None:
        self.name = name
        self._policy = policy
        self._is_evictable = is_evictable
        self.clock = 0.0
        self.evicted_nodes = 0
        self.evicted_tokens = 0
        self._heap: list[tuple[float, int, DocumentNode]] = []
        self._live_at_rebuild = 0

    def priority(self, statistics: NodeStatistics) -> float:
        return self._policy.priority(statistics, self.clock)

    def offer(self, node: DocumentNode) -> None:
        """Let `node` be a candidate at its present priority; no-op when it already is."""
        priority = node.priorities[self.name]
        if node.offered[self.name] == priority:
            return
        node.offered[self.name] = priority
        heapq.heappush(self._heap, (priority, node.id, node))
        if len(self._heap) > _STALE_ENTRIES_KEPT and len(self._heap) > 2 * self._live_at_rebuild:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_current(entry)]
        heapq.heapify(self._heap)
        self._live_at_rebuild = len(self._heap)

    def _is_current(self, entry: tuple[float, int, DocumentNode]) -> bool:
        priority, _, node = entry
        current = node.offered[self.name] == priority
        if current and not self._is_evictable(node):
            node.offered[self.name] = None  # offered again once it is evictable
            return False
        return current

    def pop(self) -> DocumentNode | None:
        """Take the evictable node of the lowest priority, or None when there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                entry[2].offered[self.name] = None
                return entry[2]
        return None

    def record_eviction(self, priority: float, tokens: int) -> None:
        self.clock = max(self.clock, priority)
        self.evicted_nodes += 1
        self.evicted_tokens += tokens

    def reset(self) -> None:
        """Forget all candidates and set the clock back, as after a flush."""
        self._heap.clear()
        self._live_at_rebuild = 0
        self.clock = 0.0


class KnowledgeComponent(FullComponent):
    """The full-attention component with our victims in place of SGLang's.

    SGLang's walk asks for one device leaf at a time and tells the component nothing about
    what became of it; the component finds out at the next step, from the node itself.
    """

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        policy = cache.settings.policy
        self.device = Tier(
            TierName.DEVICE, policy, lambda n: n in self.tree_core.evictable_device_leaves
        )
        self.host = Tier(TierName.HOST, policy, lambda n: n in self.tree_core.evictable_host_leaves)
        self._wanted_tokens = 0
        self._victim: DocumentNode | None = None
        self._declined: list[DocumentNode] = []

    def reset_tiers(self) -> None:
        self.device.reset()
        self.host.reset()

    # SGLang's device walk: start, then one node a step, then end.

    def _evict_device_start(self, request_cnt: int) -> None:
        self._wanted_tokens = request_cnt

    def _evict_device_next_node(
        self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> int | None:
        self._settle_victim()
        if tracker[ComponentType.FULL] >= self._wanted_tokens:
            return None
        self._victim = self.device.pop()
        return None if self._victim is None else self._victim.id

    def _evict_device_end(self) -> None:
        self._settle_victim()
        # Set aside until now, or a walk that can't free them would never end.
        for node in self._declined:
            if node in self.tree_core.evictable_device_leaves:
                self.device.offer(node)
        self._declined.clear()

    def _settle_victim(self) -> None:
        node, self._victim = self._victim, None
        if node is None:
            return
        if node.evicted or not self.tree_core.is_registered(node):
            self.device.record_eviction(node.priorities[TierName.DEVICE], len(node.key))
        else:
            self._declined.append(node)

    def drive_host_eviction(
        self,
        num_tokens: int,
        tracker: Any,
        device_frees: Any,
        host_frees: Any,
        cache_actions: Any,
    ) -> None:
        """Drop host leaves, lowest priority first, until `num_tokens` are free."""
        while tracker[ComponentType.FULL] < num_tokens:
            node = self.host.pop()
            if node is None:
                return
            self.tree_core._evict_host_leaf(
                node, tracker, device_frees, host_frees, cache_actions=cache_actions
            )
            self.host.record_eviction(node.priorities[TierName.HOST], len(node.key))
