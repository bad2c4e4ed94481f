"""The tree's side of a storage backend: what is written and when, what comes back, what must go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import orjson
import torch

from rag_radix.errors import UnsupportedError
from rag_radix.node import Occurrence
from rag_radix.retrieval import Retrieval
from rag_radix.statistics import DocumentKey, namespace_name
from rag_radix.storage import histories
from rag_radix.storage.agreement import is_alike
from rag_radix.storage.backend import VerifiedFiles
from rag_radix.storage.files import SegmentFiles
from rag_radix.storage.identity import identity, identity_name, rank_name
from rag_radix.storage.marks import Mark, Marks
from rag_radix.storage.preloading import Preloading
from rag_radix.storage.segment import Name
from rag_radix.storage.sidecar import FORMAT_VERSION, Sidecar

if TYPE_CHECKING:
    from rag_radix.control.selector import Selector
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode

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
        self._restore(sidecar.read())
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
        if self._files is not None:
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
        """Give what is queued time to be written, and save the statistics."""
        controller = self._tree.cache_controller
        deadline = time.monotonic() + _FINISH_S
        while controller.backup_queue.qsize() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._sidecar is not None:
            self._sidecar.finish(self._snapshot())

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
            tokens = None if mark.namespace or key.is_bigram else key.raw_token_ids()
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

    def cleared(self) -> None:
        """The backend has nothing any more."""
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

    def restored(self, node: DocumentNode, req: Any, handle: Any) -> None:
        """`node` has come from storage: cut it where nodes were, name it and give it the
        statistics that it had.

        Args:
            req: The request that it was read for; None where that has ended, or there is none.
            handle: SGLang's of the reading.
        """
        tree, core = self._tree, self._tree.tree_core
        there = core.path_to(node.id)[:-1]
        done = 0
        for end in [i for i, page in enumerate(node.hash_value[:-1], 1) if self.marks.get(page)]:
            tree._split(node, (end - done) * core.page_size)
            done = end
        if req is not None:
            retrieval = Retrieval.of(req, tree.settings.max_depth)
            tree._cut_and_name(retrieval, core.path_to(node.id), req)
        preloading = self.preloading
        names_all = preloading is not None and preloading.is_loading(handle)
        path = core.path_to(node.id)
        for piece in path:
            if piece not in there:
                is_known = names_all and self.marks.get(piece.hash_value[-1]) is not None
                if req is None and not is_known:
                    core.forget_names(piece)
                self._recall(piece)
        for above, below in zip(path[-2::-1], path[:0:-1], strict=True):
            above.statistics.frequency = max(above.statistics.frequency, below.statistics.frequency)
        for each in path:
            core.rank(each)

    def _recall(self, node: DocumentNode) -> None:
        key = node.hash_value[-1]
        mark = self.marks.get(key)
        if mark is not None and mark.node is None:
            old, statistics = mark.statistics, node.statistics
            statistics.frequency = old.frequency
            statistics.document_frequency = old.document_frequency
            statistics.cost_per_token_s = old.cost_per_token_s
            statistics.cost_samples = old.cost_samples
            if mark.path is not None:
                statistics.history = self._tree.histories.get(mark.path)
            if mark.names_forgotten:
                self._tree.tree_core.forget_names(node)
            self._rename(node, mark)
        node.mark = self.marks.attach(node, key)

    def _rename(self, node: DocumentNode, mark: Mark) -> None:
        key = node.key
        # A document that several tenants may share has no salt, although its place has one.
        salts = {namespace_name(key.extra_key, salt): salt for salt in (None, key.cache_salt)}
        core = self._tree.tree_core
        path = core.path_to(node.id)
        lengths = set(accumulate(above.statistics.tokens for above in reversed(path)))
        for name in mark.names:
            if name.namespace not in salts:
                core.forget_names(node)
                continue
            salt = salts[name.namespace]
            document = DocumentKey(name.id, name.version, key.extra_key, salt)
            if name.tokens in lengths:
                core.name(node, Occurrence(document, name.tokens))
            else:
                core.note_unmarked(node, document)

    # What must go

    def retire(self, selector: Selector, nodes: Iterable[DocumentNode]) -> None:
        """Let the documents that `selector` means be read no more.

        Args:
            nodes: What has gone from the tree by it.
        """
        tree = self._tree
        if self._files is None and not tree.enable_storage:
            return
        # They may be reading what goes.
        for request in list(tree.ongoing_prefetch):
            tree.release_aborted_request(request)
        pages: list[str] = []
        for node in nodes:
            pages += node.hash_value or ()
            if node.mark is not None:
                self.marks.remove(node.mark.key)
                node.mark = None
        files = self._files
        if files is not None:
            files.look()
        if selector.is_everything:
            self.marks.clear()
            if files is not None:
                files.clear()
            return
        if selector.is_all and selector.namespace is not None:
            for mark in self.marks:
                if mark.node is None and mark.namespace == selector.namespace:
                    self.marks.remove(mark.key)
            if files is not None:
                files.discard_namespace(selector.namespace)
        ends: list[tuple[str, int]] = []
        for mark in self.marks.absent(selector):
            found = self._ends(selector, mark.key, mark.pages, mark.names)
            if mark.names_forgotten:
                found.append((mark.key, mark.pages))
            if found:
                self.marks.remove(mark.key)  # by what all ranks know alike
            ends += found
        if files is not None:
            for id in selector.ids(files.documents()):
                for key, length, names in files.named(id):
                    ends += self._ends(selector, key, length, names)
            files.discard(pages)
            files.discard_documents(ends, lambda page: self._keeps(selector, page))

    def _ends(
        self, selector: Selector, key: str, pages: int, names: Iterable[Name]
    ) -> list[tuple[str, int]]:
        """Where documents end that `selector` means, and how many pages go with each, of a node
        of `pages` that isn't in the tree."""
        mark = self.marks.get(key)
        if mark is not None and mark.node is not None:
            return []  # the tree has decided
        page_size = self._tree.page_size
        return [
            (key, -(-name.tokens // page_size) or pages) for name in names if selector.matches(name)
        ]

    def _keeps(self, selector: Selector, page: str) -> bool:
        """Whether a document ends with `page` that `selector` doesn't mean."""
        mark, files = self.marks.get(page), self._files
        if mark is not None and mark.node is not None:
            return True
        names = () if files is None else files.names_at(page)
        known = () if mark is None else mark.names
        return any(not selector.matches(name) for name in (*names, *known))

    # Statistics

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
            sidecar.write(self._snapshot())

    def _snapshot(self) -> Callable[[bytes], dict[str, Any]]:
        """What there is to save now, in a form that another thread can finish."""
        tree, files = self._tree, self._files
        marks = list(self.marks)
        documents = tree.document_frequencies.counts()
        paths = histories.saved(tree.histories) if tree.settings.policy.uses_history else None
        state = {
            "format": FORMAT_VERSION,
            "access_time": tree.tree_core.access_time,
            "device_clock": tree.component.device.clock.evicted,
            "host_clock": tree.component.host.clock.evicted,
        }

        def collect(others: bytes) -> dict[str, Any]:
            stored = {mark.key: mark.as_json() for mark in marks if _has(files, mark.key)}
            counts = dict(documents())
            remembered = None if paths is None else paths()
            if others:
                theirs = orjson.loads(others)
                remembered = remembered or theirs.get("histories")
                for fields in theirs["marks"]:
                    if _has(files, fields["key"]):
                        mine = stored.setdefault(fields["key"], fields)
                        names = map(tuple, (*mine["names"], *fields["names"]))
                        mine["names"] = list(dict.fromkeys(names))
                for id, version, namespace, count in theirs["documents"]:
                    key = id, version, namespace
                    counts[key] = max(counts.get(key, 0), count)
            return {
                **state,
                "marks": list(stored.values()),
                "documents": [(*key, count) for key, count in counts.items()],
                "histories": remembered,
            }

        return collect

    def _restore(self, text: bytes) -> None:
        """Take over what an earlier server has saved, if all ranks have read the same."""
        tree = self._tree
        if not is_alike(tree, text):
            logger.warning("Storage: ranks have read different statistics, which are ignored")
            return
        if not text:
            return
        try:
            saved = orjson.loads(text)
            if saved["format"] != FORMAT_VERSION:
                raise ValueError(f"format {saved['format']}, not {FORMAT_VERSION}")
            marks = [Mark.of_json(fields, self.marks) for fields in saved["marks"]]
            documents = {
                (str(id), str(version), str(namespace)): int(count)
                for id, version, namespace, count in saved["documents"]
            }
            clocks = float(saved["device_clock"]), float(saved["host_clock"])
            access_time = int(saved["access_time"])
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("Storage: the statistics can't be understood: %r", error)
            return
        for mark in marks:
            self.marks.add(mark)
            self.marks.left(mark)
        tree.document_frequencies.restore(documents)
        tree.tree_core.continue_from(access_time)
        component = tree.component
        for tier, evicted in zip((component.device, component.host), clocks, strict=True):
            tier.clock.evicted = max(tier.clock.evicted, evicted)
        self._restore_histories(saved.get("histories"))

    def _restore_histories(self, saved: dict[str, Any] | None) -> None:
        tree = self._tree
        # A tree that has some of its own has been there before the backend.
        if saved is None or not tree.settings.policy.uses_history or len(tree.histories):
            return
        try:
            histories.restore(tree.histories, saved, tree.tree_core.access_time)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            logger.warning("Storage: the histories of paths can't be understood: %r", error)

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


def _has(files: SegmentFiles | None, page: str) -> bool:
    return files is None or page in files
