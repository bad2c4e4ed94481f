"""Host slots on their way from what leaves the host to what is copied there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rag_radix.sglang_compat import HostKVCache

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree


class HostSlots:
    """The free slots of the host tier, those first that became free during this eviction.

    SGLang's pool checks each slot that it takes back and each that it gives out, 30 us for a
    document of 1,600 tokens. What leaves the host makes room for what comes, so its slots are
    handed on instead, and what is left is kept for the next eviction, unless a storage backend
    asks the pool for slots as well. The pool doesn't miss them: nothing reads or writes a node
    that may leave the host.

    Attributes:
        kept_tokens: Free slots that the pool doesn't know of.
    """

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._kept: list[torch.Tensor] = []
        self.kept_tokens = 0
        self._promised_tokens = 0

    @property
    def _pool(self) -> Any:
        return self._tree.cache_controller.mem_pool_host

    @property
    def are_alike(self) -> bool:
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
        return available + self.kept_tokens - self._promised_tokens

    def keep(self, slots: list[torch.Tensor]) -> None:
        """Take slots of nodes that have left the host."""
        self._kept += slots
        self.kept_tokens += sum(part.numel() for part in slots)

    def promise(self, tokens: int) -> None:
        """So many of the available slots will be taken."""
        self._promised_tokens += tokens

    def take(self) -> torch.Tensor:
        """The slots that were promised."""
        promised, self._promised_tokens = self._promised_tokens, 0
        if (missing := promised - self.kept_tokens) > 0:
            self.keep([self._pool.alloc(missing)])
        self.kept_tokens -= promised
        slots = torch.cat(self._kept)
        self._kept = [slots[promised:]]
        return slots[:promised]

    def give_back(self) -> None:
        """Return what wasn't needed to the pool, if anybody else asks it for slots."""
        if self.kept_tokens and self._tree.enable_storage:
            self._pool.free(torch.cat(self._kept))
            self.reset()

    def reset(self) -> None:
        """The pool has all slots again."""
        self._kept, self.kept_tokens, self._promised_tokens = [], 0, 0
