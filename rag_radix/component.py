"""The full-attention component with our victims in place of SGLang's."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rag_radix.policies.base import TierName
from rag_radix.sglang_compat import ComponentType, FullComponent
from rag_radix.tiers import DuplicateTier, Tier

if TYPE_CHECKING:
    import torch

    from rag_radix.node import DocumentNode


@dataclass(slots=True)
class HostVictims:
    """What could leave the host to make room, in order.

    Attributes:
        duplicates: Nodes that only lose their host copy; they stay on the device.
        leaves: Nodes that leave the tree, as far as that is needed; enough of them to make
            all the room by themselves, if there are.
    """

    duplicates: list[DocumentNode] = field(default_factory=list)
    leaves: list[DocumentNode] = field(default_factory=list)


class KnowledgeComponent(FullComponent):
    """The eviction order of both tiers, and of host copies that the device has as well."""

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        self.policy = policy = cache.settings.policy
        self.device = Tier(
            TierName.DEVICE, policy, lambda n: n in self.tree_core.evictable_device_leaves
        )
        self.host = Tier(TierName.HOST, policy, lambda n: n in self.tree_core.evictable_host_leaves)
        self.duplicates = DuplicateTier(
            TierName.DUPLICATE, policy, lambda n: self.tree_core.is_reclaimable(n)
        )
        self.tiers: tuple[Tier, ...] = (self.device, self.host)
        if policy.reclaims_duplicates:
            self.tiers += (self.duplicates,)

    def reset_tiers(self, now: int) -> None:
        for tier in self.tiers:
            tier.reset(now)

    def reclaimable_value_len(self, node: Any) -> int:
        # SGLang asks the tensor, which costs ten times as much, at each lock and unlock.
        on_device = node.component_data[ComponentType.FULL].value is not None
        return len(node.key.token_ids) if on_device else 0

    def redistribute_on_node_split(self, new_parent: Any, child: Any) -> None:
        super().redistribute_on_node_split(new_parent, child)
        # The upper half takes the place of `child` below their parent.
        new_parent.on_device = child.on_device
        new_parent.device_children = int(child.on_device)

    # Host

    def choose_host_victims(self, tokens: int) -> HostVictims | None:
        """What could leave the host to free `tokens`, lowest priority first; None when that
        isn't possible. A node whose children would all leave may leave after them.

        The nodes are no candidates until they are evicted or given back to `keep`.
        """
        leaves, freed_by_leaves = self._choose_host_leaves(tokens)
        victims, freed = HostVictims(leaves=leaves), 0
        if self.policy.reclaims_duplicates:
            while freed < tokens and (node := self.duplicates.pop()) is not None:
                victims.duplicates.append(node)
                freed += node.statistics.tokens
        if freed + freed_by_leaves >= tokens:
            return victims
        self.keep(victims)
        return None

    def _choose_host_leaves(self, tokens: int) -> tuple[list[DocumentNode], int]:
        """The leaves, and what they free: `tokens` or more, if that is possible."""
        leaves: list[DocumentNode] = []
        chosen: set[int] = set()
        bared: list[tuple[float, int, DocumentNode]] = []  # leaves once the chosen are gone
        freed = 0
        while freed < tokens:
            node = self.host.pop()
            if bared and (node is None or bared[0][:2] < self.host.order(node)):
                if node is not None:
                    self.host.offer(node)
                node = heapq.heappop(bared)[2]
            if node is None:
                break
            leaves.append(node)
            freed += node.statistics.tokens
            chosen.add(node.id)
            parent: DocumentNode = node.parent
            if self.tree_core.is_host_leaf_without(parent, chosen):
                self.host.refresh(parent)
                heapq.heappush(bared, (*self.host.order(parent), parent))
        return leaves, freed

    def keep(self, victims: HostVictims) -> None:
        """Make chosen victims candidates again."""
        for node in victims.duplicates:
            if self.tree_core.is_reclaimable(node):
                self.duplicates.offer(node)
        for node in victims.leaves:
            if node in self.tree_core.evictable_host_leaves:
                self.host.offer(node)

    def evict_from_host(self, tokens: int) -> list[torch.Tensor]:
        """Free `tokens` of the host, or as many as can be; returns the slots that are free."""
        freed: list[torch.Tensor] = []
        while tokens > 0:
            if (duplicate := self.duplicates.pop()) is not None:
                freed.append(self.tree_core.give_up_copy(duplicate))
            elif (leaf := self.host.pop()) is not None:
                freed.append(self._evict_leaf(leaf))
            else:
                break
            tokens -= len(freed[-1])
        return freed

    def evict_victims(self, victims: HostVictims, tokens: int) -> list[torch.Tensor]:
        """Let as many of `victims` leave the host as it takes to free `tokens`; returns the
        slots that are free."""
        freed = [self.tree_core.give_up_copy(node) for node in victims.duplicates]
        tokens -= sum(node.statistics.tokens for node in victims.duplicates)
        left = iter(victims.leaves)
        while tokens > 0 and (leaf := next(left, None)) is not None:
            freed.append(self._evict_leaf(leaf))
            tokens -= leaf.statistics.tokens
        if spared := list(left):
            self.keep(HostVictims(leaves=spared))
        return freed

    def _evict_leaf(self, node: DocumentNode) -> torch.Tensor:
        slots: torch.Tensor = self.tree_core.leave_host(node)
        self.host.record_eviction(node)
        return slots
