"""The knowledge tree: SGLang's unified radix cache with document nodes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any

import torch
from sglang.srt.runtime_context import get_lora

from rag_radix.component import KnowledgeComponent
from rag_radix.control.control import Control
from rag_radix.copy_failures import CopyFailures
from rag_radix.counters import RequestCounters
from rag_radix.counting import Counting
from rag_radix.history import PathHistories
from rag_radix.integrity import check_integrity
from rag_radix.namespaces import prompt_key
from rag_radix.node import UNRANKED, DocumentNode, Occurrence
from rag_radix.recording import TraceRecorder
from rag_radix.report import report
from rag_radix.retrieval import Retrieval
from rag_radix.settings import TreeSettings
from rag_radix.sglang_compat import (
    ComponentType,
    DecLockRefParams,
    EvictResult,
    FreeDeviceKV,
    RadixKey,
    TreeLock,
    UnifiedRadixCache,
    time_counter,
)
from rag_radix.speculation import Speculations
from rag_radix.statistics import DocumentFrequencies
from rag_radix.storage.storing import Storing
from rag_radix.swap_out import SwapOut
from rag_radix.tree_core import KnowledgeTreeCore

_FULL = ComponentType.FULL
# Of the waiting queue, however long it is.
_WAITING_CONSIDERED = 128


class KnowledgeTree(UnifiedRadixCache):
    """A radix cache that knows documents.

    What a request has computed is inserted below what it has locked, and its path is cut at
    document boundaries, without copying anything; the documents' nodes are named, and each node
    of the path is counted once per retrieval. Which node leaves a tier next is up to
    `KnowledgeComponent`; a document that leaves the device is copied to host unless it has a copy
    there, a tail only when a later request has used it.

    Boundaries round down to a page: the page that straddles one belongs to the later node.

    Attributes:
        settings: Policy and prefill cost.
        counters: What requests found.
        document_frequencies: Retrievals per document; survive eviction, not a flush.
        histories: Uses per path, for policies that ask for them; likewise.
        recorder: Writes the trace, if one is recorded.
        speculations: Guesses in flight, and those that have ended.
        control: What operators do to it.
        storing: What of it is in a storage backend.
        waiting: The requests that wait to be served, next ones first.
        is_alone: Whether it is the only rank's, where there is a host tier.
    """

    tree_core: KnowledgeTreeCore

    def __init__(
        self,
        params: Any,
        settings: TreeSettings,
        recorder: TraceRecorder | None = None,
        weights: Callable[[], int] = int,
    ) -> None:
        self.settings = settings
        self.recorder = recorder
        self.counters = RequestCounters()
        self.document_frequencies = DocumentFrequencies()
        self.histories = PathHistories()
        self.swap_out = SwapOut(self)
        self.copy_failures = CopyFailures(self)
        self._counting = Counting(self)
        self.speculations = Speculations(self)
        self.control = Control(self)
        self.storing = Storing(self, weights)
        self.waiting: Callable[[], Iterable[Any]] = tuple
        self.is_alone = False
        super().__init__(params)

    @property
    def component(self) -> KnowledgeComponent:
        component: KnowledgeComponent = self.components[_FULL]
        return component

    def init_hicache(self, server_args: Any, params: Any) -> None:
        """Attach the host tier and copy to it at eviction, whatever `--hicache-write-policy`
        says: write-through would copy every insert, questions and outputs included."""
        super().init_hicache(server_args, params)
        self.is_alone = self.tp_world_size == params.attn_cp_size == 1
        self.copy_failures.watch(self.cache_controller)
        self.cache_controller.write_policy = "write_back"
        self.is_write_back = True
        if self.enable_storage:
            self.storing.attached()

    def _reset_full(self) -> None:
        super()._reset_full()
        self.swap_out.host_slots.reset()
        self.storing.reset()
        self.control.reset()
        self.document_frequencies.clear()
        self.histories.clear()
        for tier in self.component.tiers:
            tier.clock.reuse = self.histories.model

    def check_integrity(self) -> None:
        """Raise AssertionError unless both tiers, the tree and its statistics agree."""
        check_integrity(self)

    def report(self) -> dict[str, Any]:
        """What is cached and what the tree has done, as plain JSON values."""
        return report(self)

    # A request's life

    def key_of(self, req: Any, token_ids: array[int], *, limit: int | None = None) -> RadixKey:
        """Where the tree has the prompt of `req`, or what of it is up to `limit`."""
        return prompt_key(
            token_ids,
            req.extra_key,
            req.cache_salt,
            limit=limit,
            shared_tokens=self._public_tokens(req),
        )

    def path_keys(self, req: Any) -> list[bytes]:
        """By document of `req` that gets a node of its own: the same for all requests that find
        it in the same place."""
        retrieval = Retrieval.of(req, self.settings.max_depth)
        return retrieval.path_keys(req, self._public_tokens(req))

    def _public_tokens(self, req: Any) -> int:
        """How much of the prompt of `req`, in whole pages, is without its salt in the tree."""
        if not req.cache_salt:
            return 0
        return self.shared_tokens(Retrieval.of(req, self.settings.max_depth).shared_tokens)

    def shared_tokens(self, asked: int) -> int:
        """How much of a prompt is without its salt in the tree, if it asks for so many tokens."""
        # Hashes for storage and events are chained along a path as if it were in one namespace.
        chained = self.enable_storage or self.tree_core.kv_events.enabled
        return 0 if chained else self.page_floor(asked)

    def match_prefix(self, params: Any) -> Any:
        """SGLang's, for prompts whose salt may cover only a part of them."""
        req, key = params.req, params.key
        if req is not None and req.cache_salt:
            params = replace(params, key=self.key_of(req, key.token_ids, limit=key.limit))
        return super().match_prefix(params)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert what `req` has computed so far, name and count its path."""
        started = time_counter()
        retrieval = Retrieval.of(req, self.settings.max_depth)
        if req.kv_rotation_base is None:
            nodes = self._publish(req, up_to, retrieval)
        else:
            # KV that ranks share out among them: SGLang decides whether it may be inserted.
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            nodes = self.tree_core.path_to(req.last_node)
        path = self._cut_and_name(retrieval, nodes, req)
        self._mark_matched(path, retrieval.inserted_end, started)
        retrieval.inserted_end = max(retrieval.inserted_end, path[-1][1] if path else 0)
        retrieval.note_hits(req)
        if self.settings.policy.uses_history:
            self.path_keys(req)
        if retrieval.counts_now(req):
            self._counting.count(retrieval, path)
        self._rank_uncounted(path)
        if self.is_write_back:
            self.swap_out.copy_ahead(node for node, _ in path)
        if self.enable_storage:
            self.storing.used(node for node, _ in path)

    def _publish(self, req: Any, up_to: int, retrieval: Retrieval) -> list[DocumentNode]:
        """SGLang's checkpoint, for what the request has locked already: its path goes on below
        that, cut at document boundaries, and so does its lock.

        SGLang would insert the whole prompt from the root, up to three times for a request, and
        give back and take again the lock of its path.

        Returns: The nodes of its path.
        """
        core, kv = self.tree_core, req.kv
        above = core.root_node.id if req.lock is None else req.lock.node
        nodes = core.path_to(above)
        start, end = sum([node.statistics.tokens for node in nodes]), self.page_floor(up_to)
        if start >= end:
            return nodes
        key = self.key_of(req, req.full_untruncated_fill_ids, limit=end)
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx][start:end]
        slots = row.to(torch.int64, copy=True)
        cuts = retrieval.cuts(core.page_size)
        found = core.extend(core.node_by_id(above), key, start, slots, cuts, req.session_id)
        for action in found.actions:
            self._apply_cache_action(action)
        for first, last, known in found.known:
            # What another request has inserted meanwhile was computed twice.
            self._apply_cache_action(FreeDeviceKV([slots[first - start : last - start]]))
            self.req_to_token_pool.write((kv.req_pool_idx, slice(first, last)), known)
        nodes += found.nodes
        req.last_node = nodes[-1].id
        req.lock = TreeLock(req.last_node, DecLockRefParams(node_id=req.last_node))
        kv.cache_protected_len = end
        kv.cache_inserted_len = max(kv.cache_inserted_len, end)
        return nodes

    def kept_bounds(self, retrieval: Retrieval) -> list[tuple[int, int]]:
        """Where the documents begin and end that get nodes of their own, in whole pages."""
        return retrieval.bounds(self.tree_core.page_size)[: len(retrieval.kept_documents)]

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        retrieval = Retrieval.of(req, self.settings.max_depth)
        if self.recorder is not None and retrieval.counted and req.finished():
            self.recorder.record(retrieval, len(req.output_ids))
        self.speculations.released(req)
        self.control.unlocked()

    def check_hicache_events(self) -> None:
        if self.enable_storage or not self.is_alone:
            super().check_hicache_events()
            if self.enable_storage:
                self.storing.poll()
        else:
            self._check_copies()
        self.control.unlocked()

    def _check_copies(self) -> None:
        """SGLang's check, of a rank that has none to agree with and no storage."""
        controller = self.cache_controller
        controller.start_writing()
        if done := self._count_ready_acks(controller.ack_write_queue):
            self.writing_check(finish_count=done)
        if done := self._count_ready_acks(controller.ack_load_queue):
            self.loading_check(finish_count=done)

    # Speculations that are promoted

    def count_running(self, req: Any) -> None:
        """Count what `req`, a speculation until now, has put into the tree so far."""
        retrieval = Retrieval.of(req, self.settings.max_depth)
        if req.lock is not None and retrieval.inserted_end > 0 and retrieval.counts_now(req):
            self._counting.count(retrieval, self._with_ends(self.tree_core.path_to(req.last_node)))

    def path_ids(self, req: Any) -> tuple[int, ...]:
        """The nodes that `req`, which ends, has used or made."""
        if req.last_node is None or Retrieval.of(req, self.settings.max_depth).inserted_end == 0:
            return ()
        return tuple(node.id for node in self.tree_core.path_to(req.last_node))

    def count_ended(
        self, retrieval: Retrieval, node_ids: Sequence[int], output_tokens: int
    ) -> None:
        """Count a request that has ended, on those of its nodes that are still in the tree."""
        left = (node_id for node_id in reversed(node_ids) if self.tree_core.has_node(node_id))
        deepest = next(left, None)
        nodes = [] if deepest is None else self.tree_core.path_to(deepest)
        self._counting.count(retrieval, self._with_ends(nodes))
        self._counting.count_documents(retrieval, retrieval.prompt_tokens)
        if self.recorder is not None:
            self.recorder.record(retrieval, output_tokens)

    @staticmethod
    def _with_ends(nodes: list[DocumentNode]) -> list[tuple[DocumentNode, int]]:
        return list(zip(nodes, accumulate([node.statistics.tokens for node in nodes]), strict=True))

    def _cut_and_name(
        self, retrieval: Retrieval, nodes: list[DocumentNode], req: Any
    ) -> list[tuple[DocumentNode, int]]:
        """Cut a path at the document boundaries that have come into the tree since the last
        checkpoint and name the nodes at which a document ends.

        Returns the path's nodes, each with the prompt position where it ends.
        """
        # What a retracted request had cut may have left the tree before it ran again.
        since = 0 if req.retracted_stain else retrieval.inserted_end
        documents = retrieval.annotation.documents
        if not documents or documents[-1].end <= since:
            return self._with_ends(nodes)
        spans = self.kept_bounds(retrieval)
        cuts = iter([cut for bounds in spans for cut in bounds if cut > since])
        path, start, cut = [], 0, next(cuts, None)
        for node in nodes:
            end = start + node.statistics.tokens
            while cut is not None and cut < end:
                if cut > start:
                    path.append((self._split(node, cut - start), cut))
                    start = cut
                cut = next(cuts, None)
            path.append((node, end))
            start = end
        ends = {end: node for node, end in path}
        for index, (first, last) in enumerate(spans):
            # A document within one page has no node of its own.
            if since < last <= start and first < last:
                document = retrieval.document_key(index)
                self.tree_core.name(ends[last], Occurrence(document, last - first))
                self.control.named(ends[last], document)
        unmarked = [
            index
            for index, (first, last) in enumerate(spans)
            if first == last or first < start < last
        ]
        for index in (*unmarked, *range(len(spans), len(documents))):
            document, span = retrieval.document_key(index), documents[index]
            for node, end in path:
                overlaps = end > span.start and end - node.statistics.tokens < span.end
                if overlaps:
                    self.tree_core.note_unmarked(node, document)
        return path

    def _split(self, node: DocumentNode, tokens: int) -> DocumentNode:
        upper, action = self.tree_core.split(node, tokens)
        if action is not None:
            self._apply_cache_action(action)
        return upper

    @staticmethod
    def _mark_matched(
        path: list[tuple[DocumentNode, int]], inserted_end: int, started: int
    ) -> None:
        """Mark the nodes that were there before this request inserted them: it has found
        them, or has computed them again and now builds on them."""
        for node, end in path:
            if end > inserted_end and node.creation_time <= started:
                node.matched = True

    def _rank_uncounted(self, path: list[tuple[DocumentNode, int]]) -> None:
        """Rank the nodes of `path` that are new and that `count` has passed over."""
        for node, _ in path:
            if node.ranks[0] is UNRANKED:
                self.tree_core.rank(node)

    def page_floor(self, tokens: int) -> int:
        """`tokens` in whole pages."""
        page: int = self.tree_core.page_size
        return tokens // page * page

    # Eviction

    def evict_for_alloc(
        self, params: Any, *, allocation_reclaim_satisfied: None = None
    ) -> EvictResult:
        """What an allocation lacks is what has to leave: there are no other kinds of cache that
        could give it, or that share their memory."""
        return self.evict(params)

    def _evict_components(
        self,
        request_by_type: dict[Any, int],
        tracker: dict[Any, int],
        available_size_targets: dict[Any, tuple[Any, int]] | None = None,
        *,
        allocation_reclaim_satisfied: None = None,
    ) -> None:
        """In place of SGLang's walk, whose victims would wait for their copies one by one."""
        if self.settings.policy.uses_history:
            self._foresee()
        self.swap_out.make_room(tracker, request_by_type[_FULL])

    def _foresee(self) -> None:
        """Note which paths the waiting requests are going to use."""
        requests = islice(self.waiting(), _WAITING_CONSIDERED)
        self.histories.expect([self.path_keys(req) for req in requests])

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None:
        """SGLang's, but the end of an eviction doesn't wait for all copies in flight: only its
        own are waited for, in `wait_for_copies`."""
        if not write_back:
            ends = self.cache_controller.ack_write_queue[:finish_count]
            with self.copy_failures.settled(ends):
                super().writing_check(finish_count=finish_count)

    def wait_for_copies(self) -> None:
        """Submit the copies to host that were begun and wait until all in flight are done."""
        controller = self.cache_controller
        controller.start_writing()
        with self.copy_failures.settled(controller.ack_write_queue):
            super().writing_check(write_back=True)

    # Storage

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """SGLang's, for a tree with nothing in it yet; copies are made at eviction with it, too."""
        if self.sidecar_pool_specs:
            return False, "the model has caches beside its KV, which storage doesn't support"
        if get_lora().enable_lora:
            return False, "storage can't be combined with LoRA adapters"
        if self.tree_core.node_count and not self.enable_storage:
            # Public nodes, and tenants' below them, are hashed in another way without storage.
            return False, "what is cached was made without storage: empty it first (/flush_cache)"
        kwargs["hicache_write_policy"] = None
        was_enabled = self.enable_storage
        done: tuple[bool, str] = super().attach_storage_backend(*args, **kwargs)
        if self.enable_storage and not was_enabled:
            self.storing.attached()
        return done

    def detach_storage_backend(self) -> tuple[bool, str]:
        if self.enable_storage:
            self.storing.finish()
        done: tuple[bool, str] = super().detach_storage_backend()
        if not self.enable_storage:
            self.storing.detached()
        return done

    def clear_storage_backend(self) -> bool:
        done: bool = super().clear_storage_backend()
        if done:
            self.storing.cleared()
        return done

    def release_host_resources(self) -> None:
        """SGLang's, which gives the host tier back while it may still be written from."""
        if self.enable_storage:
            self.detach_storage_backend()
        super().release_host_resources()

    def is_backuped(self, node_id: int) -> bool:
        """Whether what follows on a node may come from storage: below any node that is there."""
        there: bool = super().is_backuped(node_id)
        return there or self.enable_storage

    def write_backup_storage(self, node_id: int) -> None:
        """SGLang's, for nodes whose parents are stored; others wait for these."""
        if self.enable_storage and not self.copy_failures.is_wrong(node_id):
            for node in self.storing.due(self.tree_core.node_by_id(node_id)):
                super().write_backup_storage(node.id)

    def _handle_prefetch_result(self, operation: Any) -> None:
        super()._handle_prefetch_result(operation)
        arrivals, self.tree_core.arrivals = self.tree_core.arrivals, []
        rid = operation.handle.rid
        for node in arrivals:
            req = next((req for req in self.waiting() if req.rid == rid), None)
            self.storing.restored(node, req)
