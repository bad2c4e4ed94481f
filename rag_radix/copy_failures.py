"""Copies to host that fail, on one rank or on all: the server goes on without them.

SGLang would end with the error, or, on a rank that hasn't had it, take the copy for good. Ranks see
the ends of copies in the same order, so there they tell each other which have failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rag_radix.sglang_compat import HiCacheAck

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree

logger = logging.getLogger(__name__)


class _Over:
    """The end of a copy that never was."""

    @staticmethod
    def query() -> bool:
        return True

    @staticmethod
    def synchronize() -> None:
        pass


class CopyFailures:
    """What has failed of the copies that one controller makes.

    Attributes:
        nodes: How many have no copy for that reason, since start.
    """

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._here: set[int] = set()  # on this rank
        self._wrong: set[int] = set()  # nodes whose copies are just taken for done
        self.nodes = 0

    def watch(self, controller: Any) -> None:
        """Let `controller`, SGLang's, go on when a copy can't be made."""
        controller.start_writing = self._watched(controller, controller.start_writing)

    def _watched(self, controller: Any, start_writing: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            if not controller.write_queue:
                return
            copies = list(controller.write_queue)
            try:
                start_writing()
            except Exception:
                logger.exception("A copy to host has failed; its documents are computed again")
                controller.write_queue.clear()
                ids = [node_id for copy in copies for node_id in copy.node_ids]
                self._here.update(ids)
                controller.ack_write_queue.append(HiCacheAck(_Over, _Over, ids))

        return watched

    def is_wrong(self, node_id: int) -> bool:
        """Whether a copy that is just taken for done is none."""
        return node_id in self._wrong

    @contextmanager
    def settled(self, ends: Sequence[Any]) -> Iterator[None]:
        """While SGLang takes the copies that have come to their `ends` for done, on all ranks; then
        those that have failed on any of them are let go."""
        under_way = self._tree.ongoing_write_through
        ids = [node_id for end in ends for node_id in end.node_ids if node_id in under_way]
        failed = self._agreed(ids)
        self._wrong = {part for each in failed for part in under_way[each].publish_node_ids}
        try:
            yield
        finally:
            wrong, self._wrong = self._wrong, set()
        if wrong:
            self.nodes += len(wrong)
            core = self._tree.tree_core
            self._tree.swap_out.copies_failed([core.node_by_id(each) for each in sorted(wrong)])

    def _agreed(self, ids: list[int]) -> list[int]:
        """Which of `ids` have failed on any rank."""
        if not ids or (self._tree.is_alone and not self._here):
            return []
        has_failed = [node_id in self._here for node_id in ids]
        self._here.difference_update(ids)
        if not self._tree.is_alone:
            anywhere = torch.tensor(has_failed, dtype=torch.int32)
            self._tree._all_reduce_attn_groups(anywhere, torch.distributed.ReduceOp.MAX)
            has_failed = anywhere.tolist()
        return [node_id for node_id, has in zip(ids, has_failed, strict=True) if has]
