"""Host slots on their way from what leaves the host to what is copied there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rag_radix.sglang_compat import ComponentType, HostKVCache

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree


class HostSlots:
    """The free slots of the host tier, those first that became free during this eviction.

    SGLang's pool checks each slot that it takes back and each that it gives out, 30 us for a
    document of 1,600 tokens. What leaves the host makes room for what comes, so its slots are
    handed on instead and the pool gets only what is left. It doesn't miss them meanwhile:
    nothing reads or writes a node that may leave the host.
    """

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._kept: list[torch.Tensor] = []
        self._kept_tokens = 0

    @property
    def _pool(self) -> Any:
        return self._tree.cache_controller.mem_pool_host

    @property
    def _are_alike(self) -> bool:
        """Whether any slot will do: pools that are sharded or share their memory place a node's
        slots, and sidecars need some of their own."""
        pool = self._pool.anchor_entry.host_pool
        return type(pool).alloc is HostKVCache.alloc and not self._tree.sidecar_pool_specs

    @property
    def capacity_tokens(self) -> int:
        tokens: int = self._pool.logical_size
        return tokens

    @property
    def available_tokens(self) -> int:
        available: int = self._pool.available_size()
        return available + self._kept_tokens

    def keep(self, frees: dict[Any, list[torch.Tensor]]) -> None:
        """Take the slots of nodes that have left the host from SGLang's `frees`."""
        if self._are_alike:
            for slots in frees.pop(ComponentType.FULL, ()):
                self._kept.append(slots)
                self._kept_tokens += len(slots)

    def take(self, tokens: int) -> torch.Tensor | None:
        """Slots for a copy; None when there are too few or not any will do."""
        if not self._are_alike:
            return None
        if (missing := tokens - self._kept_tokens) > 0:
            if (more := self._pool.alloc(missing)) is None:
                return None
            self._kept.append(more)
        slots = torch.cat(self._kept)
        self._kept, self._kept_tokens = [slots[tokens:]], len(slots) - tokens
        return slots[:tokens]

    def give_back(self) -> None:
        """Return what wasn't needed to the pool."""
        if self._kept_tokens:
            self._pool.free(torch.cat(self._kept))
        self._kept, self._kept_tokens = [], 0
