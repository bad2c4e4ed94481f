"""Which leaf leaves which tier next."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rag_radix.policies.base import Clock, Rank, ReplacementPolicy, TierName

if TYPE_CHECKING:
    from rag_radix.node import DocumentNode

_STALE_ENTRIES_KEPT = 128

_Entry = tuple[float, int, "DocumentNode"]


class Tier:
    """Eviction order of one memory tier: a clock and a persistent, lazily updated heap.

    An entry counts only while its node is evictable and offered at its floor, so a
    change costs one push and an eviction O(log n), never a scan of the leaves. Nodes whose
    priority changes with time are ranked again when their rank runs out.

    Attributes:
        clock: The policy's view of this tier.
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
        # Whether a rank is the last word until the node's next use.
        self._is_settled = (
            type(policy).rank is ReplacementPolicy.rank
            and type(policy).foreseen is ReplacementPolicy.foreseen
        )
        self.clock = Clock(tier=name)
        self.evicted_nodes = 0
        self.evicted_tokens = 0
        self._heap: list[_Entry] = []
        self._live_at_rebuild = 0
        # Live entries by the time at which their rank runs out.
        self._expiring: list[_Entry] = []

    def rank(self, node: DocumentNode) -> None:
        """Rank `node` by its present statistics and the clock."""
        node.statistics.has_host_copy = node.backuped
        node.ranks[self.name] = self._policy.rank(node.statistics, self.clock)

    def refresh(self, node: DocumentNode) -> None:
        """Make the priority of `node` that of now, if it changes with time or, by its history,
        with uses of other nodes; such a use only raises it, so its place in the heap holds."""
        rank = node.ranks[self.name]
        varies = rank.floor != rank.priority or self._policy.uses_history
        if varies or rank.until <= self.clock.now:
            self.rank(node)

    def order(self, node: DocumentNode) -> tuple[float, int]:
        """The key by which nodes leave, lowest first."""
        foreseen = self._policy.foreseen(node.statistics, self.clock)
        return node.ranks[self.name].priority + foreseen, node.id

    def offer(self, node: DocumentNode) -> None:
        """Let `node` be a candidate at its present rank; no-op when it already is."""
        rank = node.ranks[self.name]
        if rank.until <= self.clock.now:
            self.rank(node)
            rank = node.ranks[self.name]
        elif node.offered[self.name] == rank:
            return
        node.offered[self.name] = rank
        _, floor, until = rank
        heapq.heappush(self._heap, (floor, node.id, node))
        if until != math.inf:
            heapq.heappush(self._expiring, (until, node.id, node))
        if len(self._heap) > _STALE_ENTRIES_KEPT and len(self._heap) > 2 * self._live_at_rebuild:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_current(entry)]
        heapq.heapify(self._heap)
        self._live_at_rebuild = len(self._heap)
        self._expiring = [
            (rank.until, node_id, node)
            for _, node_id, node in self._heap
            if (rank := node.ranks[self.name]).until != math.inf
        ]
        heapq.heapify(self._expiring)

    def _is_current(self, entry: _Entry) -> bool:
        floor, _, node = entry
        offered = node.offered[self.name]
        current = offered is not None and offered.floor == floor
        if current and not self._is_evictable(node):
            node.offered[self.name] = None  # offered again once it is evictable
            return False
        return current

    def pop(self) -> DocumentNode | None:
        """Take the evictable node of the lowest priority, or None when there is none."""
        if self._is_settled:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._is_current(entry):
                    entry[2].offered[self.name] = None
                    return entry[2]
            return None
        if self._expiring and self._expiring[0][0] <= self.clock.now:
            self._rank_expired()
        best: DocumentNode | None = None
        bound = (math.inf, 0)
        passed_over: list[DocumentNode] = []
        while self._heap and (best is None or self._heap[0][:2] < bound):
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry):
                continue
            node = entry[2]
            node.offered[self.name] = None
            self.refresh(node)
            order = self.order(node)
            if best is None or order < bound:
                if best is not None:
                    passed_over.append(best)
                best, bound = node, order
            else:
                passed_over.append(node)
        for node in passed_over:
            self.offer(node)
        return best

    def _rank_expired(self) -> None:
        while self._expiring and self._expiring[0][0] <= self.clock.now:
            until, _, node = heapq.heappop(self._expiring)
            offered = node.offered[self.name]
            if offered is None or offered.until != until:
                continue
            if self._is_evictable(node):
                self.offer(node)
            else:
                node.offered[self.name] = None

    def record_eviction(self, node: DocumentNode) -> None:
        if (priority := node.ranks[self.name].priority) > self.clock.evicted:
            self.clock.evicted = priority
        self.evicted_nodes += 1
        self.evicted_tokens += node.statistics.tokens

    def reset(self, now: int) -> None:
        """Forget all candidates and set the clock back, as after a flush at time `now`."""
        self._heap.clear()
        self._expiring.clear()
        self._live_at_rebuild = 0
        self.clock = Clock(now, tier=self.name)


class DuplicateTier(Tier):
    """Host copies of nodes that are on the device: what is worth most there leaves the host
    first, since it will stay on the device longest."""

    def rank(self, node: DocumentNode) -> None:
        priority = -node.ranks[TierName.DEVICE].priority
        node.ranks[self.name] = Rank(priority, priority)

    def order(self, node: DocumentNode) -> tuple[float, int]:
        """Uses that are known to come keep a node on the device, not its copy on host."""
        return node.ranks[self.name].priority, node.id

    def refresh(self, node: DocumentNode) -> None:
        """As of when the device ranked it: a priority that rises would be a place that falls."""
