"""After a start: the hottest stored documents come to host before anybody asks for them.

One path after the other is read as if a request had asked for it, through SGLang's own prefetch:
what is worth most to the policy first and, of each path, all that is missing from the root on, so
upper nodes come before what hangs below them. Nothing leaves the host for it.

Ranks do the same in the same passes: the order follows from the statistics, of which all have read
the same, and what their files say is compared before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from rag_radix.sglang_compat import CacheRequestHandle, MatchPrefixParams, RadixKey
from rag_radix.storage.agreement import is_alike

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.storage.files import SegmentFiles
    from rag_radix.storage.marks import Marks

logger = logging.getLogger(__name__)

# While requests are computed, one path in so many passes.
_BUSY_PASSES = 16
# Between two paths as many passes as one took, and no more than these, in which a flush finds
# nothing under way.
_REST_PASSES = 20
_numbers = count()


@dataclass(slots=True)
class Preloaded:
    """How far it has come.

    Attributes:
        state: "running", "done" or "stopped".
        paths: Read so far.
        tokens: Loaded to host.
        left: Nodes that haven't been looked at yet.
    """

    state: str = "running"
    paths: int = 0
    tokens: int = 0
    left: int = 0


class Preloading:
    """Loads what `marks` knows and `files` have, until the host tier is full to its share.

    Attributes:
        progress: How far it has come.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        marks: Marks,
        files: SegmentFiles,
        is_idle: Callable[[], bool],
    ) -> None:
        self._tree = tree
        self._marks = marks
        self._files = files
        self._is_idle = is_idle
        # Ranks of a pipeline read what their first one says.
        is_on = tree.settings.preload_host_share > 0 and tree.pp_size == 1
        self._keys = self._order() if is_on else []  # the last one first
        self._handle: CacheRequestHandle | None = None
        self._passes = 0  # of reading, and then of rest
        self._busy_passes = 0
        self.progress = Preloaded(left=len(self._keys))

    def _order(self) -> list[str]:
        """What there is: of what nothing is known since its server ended too soon, all alike."""
        absent = [mark for mark in self._marks if mark.node is None and not mark.namespace]
        absent.sort(key=lambda mark: (mark.priority, mark.key))
        unknown = [key for key in self._files.marks() if self._marks.get(key) is None]
        if not is_alike(self._tree, "".join(unknown).encode()):
            unknown = []
        return [*unknown, *(mark.key for mark in absent)]

    @property
    def is_running(self) -> bool:
        """Whether there is more to come."""
        return self.progress.state == "running"

    def stop(self) -> None:
        """Leave the rest in the files."""
        self._keys.clear()
        self._end("stopped")

    def poll(self) -> None:
        """A scheduling pass begins; on all ranks."""
        if not self.is_running:
            return
        if self._handle is not None:
            self._passes = min(self._passes + 1, _REST_PASSES)
            if self._handle not in self._tree.ongoing_prefetch:
                self._arrived(self._handle)
        elif self._passes:
            self._passes -= 1
        elif not self._keys:
            self._end("done")
        elif self._may_go_on():
            self._next()

    def _end(self, state: str) -> None:
        progress = self.progress
        if progress.state == "running":
            progress.state, progress.left = state, 0
            if progress.paths:
                logger.info(
                    "Storage: %d tokens on %d paths are on host again (%s)",
                    progress.tokens,
                    progress.paths,
                    state,
                )

    def _may_go_on(self) -> bool:
        """Whether requests don't need the disk, and little else."""
        tree = self._tree
        if tree.ongoing_prefetch or any(True for _ in tree.waiting()):
            return False
        if self._is_idle():
            return True
        self._busy_passes += 1
        return self._busy_passes % _BUSY_PASSES == 0

    def _next(self) -> None:
        """Begin to load the next path that isn't there."""
        while self._keys:
            key = self._keys.pop()
            self.progress.left = len(self._keys)
            mark = self._marks.get(key)
            if mark is None or mark.node is None:
                self._load(key)
                return

    def _load(self, key: str) -> None:
        tree, stored = self._tree, self._files.path_to(key)
        content = b"" if stored is None else stored.as_bytes()
        if not is_alike(tree, content) or stored is None:
            return
        prefix = RadixKey(stored.tokens)
        found = tree.match_prefix(MatchPrefixParams(key=prefix))
        there = found.device_prefix_len + found.host_hit_length
        missing = len(prefix) - there
        if missing < tree.prefetch_threshold or missing > self._room_tokens():
            return
        handle = CacheRequestHandle(f"rag-radix-preload-{next(_numbers)}", 0)
        tree.prefetch_from_storage(
            handle,
            found.last_host_node,
            stored.tokens[there:],
            tree.get_last_hash_value(found.last_host_node),
            None,
            matched_prefix_tokens=stored.tokens[:there],
        )
        if handle in tree.ongoing_prefetch:
            self._handle = handle
        else:  # too much is being read; no request waits that could ask again
            tree.storage_prefetch_retries.cancel(handle.rid)

    def _room_tokens(self) -> int:
        tree = self._tree
        capacity: int = tree.cache_controller.mem_pool_host.logical_size
        free: int = tree.swap_out.host_slots.available_tokens
        return int(tree.settings.preload_host_share * capacity) - (capacity - free)

    def _arrived(self, handle: CacheRequestHandle) -> None:
        tree, self._handle = self._tree, None
        tokens, _ = tree.pop_prefetch_loaded_span(handle)
        tree.finish_storage_prefetch_admission(handle, tokens, None)
        tree.storage_prefetch_retries.cancel(handle.rid)
        self.progress.paths += tokens > 0
        self.progress.tokens += tokens
