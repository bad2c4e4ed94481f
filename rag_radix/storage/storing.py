"""The tree's side of a storage backend: its beginning and end, what is written and when."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from rag_radix.errors import UnsupportedError
from rag_radix.storage.agreement import is_alike
from rag_radix.storage.backend import VerifiedFiles
from rag_radix.storage.files import SegmentFiles
from rag_radix.storage.identity import identity, identity_name, rank_name
from rag_radix.storage.marks import Marks
from rag_radix.storage.preloading import Preloading
from rag_radix.storage.recall import recall
from rag_radix.storage.remembered import restore, snapshot
from rag_radix.storage.removal import StoredRemoval, remove
from rag_radix.storage.sidecar import Sidecar

if TYPE_CHECKING:
    from rag_radix.control.selector import Selector
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode
    from rag_radix.storage.segment import Name

logger = logging.getLogger(__name__)

_FINISH_S = 8.0
# Between the passes in which ranks agree on writing again what could not be written.
_POLLS = 512
# SGLang's, which counts as left open, and ours: a document is often shorter.
_SGLANG_LEAST_TOKENS = 256
_LEAST_TOKENS = 32


class Storing:
    """What of a tree is in its storage backend.

    A node is stored when it has a copy on host and its parent is stored, once: what storage has is
    whole from the root on. What a node was is kept in its mark when it leaves the tree, and comes
    back with it.

    Attributes:
        marks: Of the nodes that are stored.
        preloading: What comes to host by itself after a start.
        is_idle: Whether nothing is computed and nobody waits.
    """

    def __init__(self, tree: KnowledgeTree, weights: Callable[[], int]) -> None:
        self._tree = tree
        self._weights = weights
        self.marks = Marks()
        self.preloading: Preloading | None = None
        self.is_idle: Callable[[], bool] = lambda: True
        self._files: SegmentFiles | None = None
        self._sidecar: Sidecar | None = None
        self._saved_time = 0
        self._polls = 0

    # Beginning and end

    def attached(self) -> None:
        """SGLang has attached a storage backend.

        Raises:
            UnsupportedError: The model has caches beside its KV.
        """
        tree, controller = self._tree, self._tree.cache_controller
        if tree.sidecar_pool_specs:
            raise UnsupportedError(
                "--radix-cache-backend knowledge-tree doesn't support --hicache-storage-backend "
                "for models with caches beside their KV: drop one of the two"
            )
        tree.tree_core.marks = self.marks
        if tree.prefetch_threshold == _SGLANG_LEAST_TOKENS:
            least = max(_LEAST_TOKENS, tree.page_size)
            tree.prefetch_threshold = controller.prefetch_threshold = least
        # SGLang wraps a backend whose failures are to be tested.
        backend = getattr(controller.storage_backend, "_backend", controller.storage_backend)
        if not isinstance(backend, VerifiedFiles):
            logger.warning(
                "Storage: %s is SGLang's: invalidation doesn't reach it, and what it returns isn't "
                "verified. --hicache-storage-backend file does both",
                controller.storage_backend_type,
            )
            return
        config, settings = backend.config, tree.settings
        whose = identity(config, controller.storage_host_pool, self._agreed_weights())
        name = identity_name(whose)
        directory = backend.root / f"rag-radix-{name}"
        budget = None if settings.storage_gib is None else int(settings.storage_gib * 2**30)
        if budget is not None and not config.is_mla_model:
            budget //= config.tp_size
        self._files = SegmentFiles(directory / rank_name(config), name, budget, self.marks.priority)
        backend.open(self._files)
        sidecar = Sidecar(directory / "statistics.json")
        restore(tree, self.marks, sidecar.read())
        self._files.keep_budget()  # by what they are worth
        self._sidecar = sidecar if config.tp_rank == 0 and config.attn_cp_rank == 0 else None
        logger.info(
            "Storage: %s, %d files with %.1f MiB, statistics of %d nodes and %d documents",
            directory,
            len(self._files),
            self._files.bytes / 2**20,
            len(self.marks),
            len(tree.document_frequencies),
        )
        self.preloading = Preloading(tree, self.marks, self._files, lambda: self.is_idle())

    def _agreed_weights(self) -> str:
        """Of all ranks, the same on all of them."""
        digest = self._weights()
        least, most = torch.tensor(digest), torch.tensor(digest)
        self._tree._all_reduce_attn_groups(least, torch.distributed.ReduceOp.MIN)
        self._tree._all_reduce_attn_groups(most, torch.distributed.ReduceOp.MAX)
        return f"{int(least):016x}{int(most):016x}"

    def weights_changed(self) -> None:
        """The model has other weights: what was stored with the old ones is another's."""
        if self._files is not None and self._tree.enable_storage:
            self.finish()
            self.marks = Marks()
            self.attached()

    def detached(self) -> None:
        """SGLang has let go of the backend. Invalidation still reaches its files."""
        self._sidecar = None
        self._stop_preloading()

    def _stop_preloading(self) -> None:
        if self.preloading is not None:
            self.preloading.stop()

    def finish(self) -> None:
        """Give what is queued time to be written, and save the statistics. What had to go and
        couldn't is tried a last time."""
        controller = self._tree.cache_controller
        deadline = time.monotonic() + _FINISH_S
        while controller.backup_queue.qsize() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._files is not None:
            self._files.try_to_remove()
        if self._sidecar is not None:
            self._sidecar.finish(snapshot(self._tree, self.marks, self._files))

    def reset(self) -> None:
        """All nodes have left the tree, and SGLang has forgotten what was to be written."""
        self._stop_preloading()
        self.marks.tree_reset()
        if self._files is not None:
            self._files.break_promises()

    # Out

    def due(self, node: DocumentNode) -> list[DocumentNode]:
        """What is to be written now that `node` has a copy on host: itself and what hangs below
        it, or nothing yet."""
        tree = self._tree
        root = tree.tree_core.root_node
        if node.mark is not None or not (node.parent is root or node.parent.mark is not None):
            return []
        above = node
        while above is not root:
            if tree.control.is_retired(above):
                return []
            above = above.parent
        nodes = [node]
        for each in nodes:
            self._promise(each)
            nodes += [
                child
                for child in each.children.values()
                if child.backuped
                and child.mark is None
                and child.write_through_pending_id is None
                and not tree.control.is_retired(child)
            ]
        return nodes

    def _promise(self, node: DocumentNode) -> None:
        hashes = node.hash_value
        node.mark = self.marks.attach(node, hashes[-1])
        if self._files is not None and not self._tree.cache_controller.backup_skip:
            parent = node.parent.hash_value
            mark, key = node.mark, node.key
            # What a tenant has asked can't be read in files.
            is_public = not (mark.namespace or key.is_bigram)
            tokens = array("q", key.raw_token_ids()) if is_public else None
            self._files.promise(
                parent[-1] if parent else None, hashes, mark.names, mark.namespace, tokens
            )

    def wants(self, node: DocumentNode) -> bool:
        """Whether `node` has been used often enough to be copied and stored ahead of eviction."""
        return (
            self._tree.enable_storage
            and node.mark is None
            and node.statistics.frequency >= self._tree.settings.store_after
        )

    def used(self, nodes: Iterable[DocumentNode]) -> None:
        """A request has used `nodes`, upper ones first: what of them has a copy on host and isn't
        stored, since the backend was cleared or what is above it wasn't stored, is written."""
        for node in nodes:
            if node.mark is None and node.backuped and node.write_through_pending_id is None:
                self._tree.write_backup_storage(node.id)

    def cleared(self) -> None:
        """The backend has nothing any more; what is in the tree is written again when it is
        used."""
        for node in self._tree.tree_core.nodes():
            node.mark = None
        self.marks.clear()

    def _store_again(self) -> None:
        """Write what is missing of all that has a copy on host."""
        tree, nodes = self._tree, self._tree.tree_core.nodes()
        for node in nodes:
            if node.mark is not None:
                node.mark.left()
                node.mark = None
        for node in nodes:
            if node.backuped and node.write_through_pending_id is None:
                tree.write_backup_storage(node.id)

    # In

    def restored(self, node: DocumentNode, req: Any) -> None:
        """`node` has come from storage for `req`, or for a request that has ended or for nobody
        where there is none; on all ranks at once."""
        names: dict[str, tuple[Name, ...]] | None = {}
        if self._files is not None:
            names = self._files.names_along(node.hash_value)
            content = repr(sorted(names.items())).encode()
            if not is_alike(self._tree, content):
                names = None
        recall(self._tree, self.marks, node, req, names)

    # What must go

    def retire(self, selector: Selector, nodes: Iterable[DocumentNode]) -> StoredRemoval | None:
        """Let the documents that `selector` means be read no more; `nodes` have gone from the
        tree by it. Returns what has become of their files, if there are files of ours."""
        if self._files is None and not self._tree.enable_storage:
            return None
        return remove(self._tree, self.marks, self._files, selector, nodes)

    # Now and then

    def poll(self) -> None:
        """A scheduling pass begins; on all ranks, and on each as often."""
        self._save_if_due()
        if self.preloading is not None:
            self.preloading.poll()
        self._polls += 1
        if self._polls % _POLLS == 0:
            is_due = torch.tensor(int(self._files is not None and self._files.is_to_try_again()))
            self._tree._all_reduce_attn_groups(is_due, torch.distributed.ReduceOp.MAX)
            if is_due:
                self._store_again()

    def _save_if_due(self) -> None:
        sidecar, now = self._sidecar, self._tree.tree_core.access_time
        if sidecar is not None and self._saved_time != now and sidecar.is_due():
            self._saved_time = now
            sidecar.write(snapshot(self._tree, self.marks, self._files))

    def report(self) -> dict[str, Any] | None:
        files = self._files
        if files is None:
            return None
        return {
            "files": len(files),
            "bytes": files.bytes,
            "known_nodes": len(self.marks),
            **asdict(files.counters),
            "preloaded": None if self.preloading is None else asdict(self.preloading.progress),
        }
