"""The tree itself: what matching, inserting and splitting do to its nodes and their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rag_radix.namespaces import child_key_at, run_at
from rag_radix.node import DocumentNode, Occurrence
from rag_radix.places import Places
from rag_radix.sglang_compat import ComponentType, MatchResult, RadixKey, compute_node_hash_values
from rag_radix.statistics import DocumentKey
from rag_radix.tier_moves import TierMoves

if TYPE_CHECKING:
    from rag_radix.storage.marks import Marks

_FULL = ComponentType.FULL
# Names of one node: a client may name the same tokens differently in every request.
_NAMES_KEPT = 8


class Extension(NamedTuple):
    """How a path went on.

    Attributes:
        nodes: What it goes on with, locked once.
        known: Half-open spans of the key that the device had already, and their slots there.
        actions: SGLang's, to be applied.
    """

    nodes: list[DocumentNode]
    known: list[tuple[int, int, torch.Tensor]]
    actions: list[Any]


class KnowledgeTreeCore(TierMoves):
    """SGLang's Python tree core with document nodes.

    Attributes:
        access_time: Logical time: retrievals served so far.
        splits: Nodes cut in two.
        marks: Of the nodes that a storage backend has, where there is one.
        arrivals: What has come from it and wasn't taken notice of.
        places: Where documents are.
    """

    run_at = staticmethod(run_at)

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        self.access_time = 0
        self.splits = 0
        self.marks: Marks | None = None
        self.arrivals: list[DocumentNode] = []
        self.places = Places(lambda: self._node_arena.values())
        super().__init__(params, components)

    def reset(self) -> None:
        self._component.reset_tiers(self.access_time)
        super().reset()
        self.places.clear()
        self.holdings.clear()
        self.observer.tree_reset()

    def advance(self) -> int:
        """One more retrieval is served: the new logical time."""
        self.access_time += 1
        for tier in self._component.tiers:
            tier.clock.now = self.access_time
        return self.access_time

    def continue_from(self, access_time: int) -> None:
        """Logical time goes on where that of an earlier server has ended."""
        self.access_time = max(self.access_time, access_time)
        for tier in self._component.tiers:
            tier.clock.now = self.access_time

    def has_node(self, node_id: int) -> bool:
        """Whether a node with this id is still part of the tree; ids are never used again."""
        return node_id in self._node_arena

    @property
    def node_count(self) -> int:
        """How many nodes there are but the root."""
        return len(self._node_arena) - 1

    def nodes(self) -> list[DocumentNode]:
        """All nodes but the root, parents before their children."""
        return [node for node in self._collect_all_nodes() if node is not self.root_node]

    def path_to(self, node_id: int) -> list[DocumentNode]:
        """Nodes from below the root to `node_id`, in prompt order."""
        path = []
        node = self.node_by_id(node_id)
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    # Documents

    def name(self, node: DocumentNode, occurrence: Occurrence) -> None:
        """A document ends at `node`."""
        if occurrence not in node.occurrences:
            if len(node.occurrences) == _NAMES_KEPT:
                node.names_forgotten = True
                self.places.add_unknown(node)
                self.holdings.named(node, node.occurrences[0], -1)
            node.occurrences = (*node.occurrences, occurrence)[-_NAMES_KEPT:]
            self.places.add(occurrence.document.id, node)
            self.holdings.named(node, occurrence, 1)
        while node.parent is not None and node.is_tail:
            node.is_tail = False
            self.holdings.tails -= 1
            node = node.parent

    def note_unmarked(self, node: DocumentNode, document: DocumentKey) -> None:
        """A document lies at `node` and has none of its own."""
        if document not in node.unmarked_documents:
            if len(node.unmarked_documents) == _NAMES_KEPT:
                self.forget_names(node)
            node.unmarked_documents = (*node.unmarked_documents, document)[-_NAMES_KEPT:]
            self.places.add(document.id, node)

    def forget_names(self, node: DocumentNode) -> None:
        """Documents lie at `node`, in any part of it, of which it isn't known which."""
        node.names_forgotten = node.unmarked_forgotten = True
        self.places.add_unknown(node)

    def hide(self, node: DocumentNode, key: Any) -> None:
        """Let no prompt find `node` and what is below it: from now on it has `key`, the same
        tokens in a namespace of its own."""
        children = node.parent.children
        del children[node.key.child_key(self.page_size)]
        node.key = key
        children[key.child_key(self.page_size)] = node

    # Matching

    def match_prefix(self, params: Any) -> MatchResult:
        """SGLang's, for one component; uses are counted elsewhere, so it leaves no traces but a
        cut where a prompt leaves a node."""
        key, page_size = params.key, self.page_size
        length = len(key) // page_size * page_size
        node = device_node = self.root_node
        position = device_tokens = 0
        actions = []
        while position < length:
            run = run_at(key, position)
            child = node.children.get(child_key_at(run, position, page_size))
            if child is None:
                break
            matched = self._matched(child, run, position)
            if matched < child.statistics.tokens:
                child, action = self._split_node(child.key, child, matched)
                actions = [action] if action is not None else []
                length = position + matched
            node = child
            position += matched
            if node.component_data[_FULL].value is not None:
                device_node, device_tokens = node, position
        return MatchResult(
            device_prefix_len=device_tokens,
            last_device_node=device_node.id,
            last_host_node=node.id,
            best_match_node=node.id,
            host_hit_length=position - device_tokens,
            full_kv_hit_length=position,
            last_visited_node_id=node.id if node is not self.root_node else None,
            cache_actions=actions,
        )

    def _matched(self, node: DocumentNode, run: RadixKey, position: int) -> int:
        """How many tokens of `node` `run` goes on with at `position`, in whole pages."""
        tokens = node.key.token_ids
        end = position + len(tokens)
        # Mostly all of them: SGLang's search for the first that differs takes a comparison for
        # each doubling.
        if end <= len(run) and run.token_ids[position:end] == tokens:
            return node.statistics.tokens
        matched: int = node.key.match_at(run, position, page_size=self.page_size)
        return matched

    # Inserting

    def _new_node(self, priority: int = 0) -> DocumentNode:
        node = DocumentNode(self.component_types, priority)
        node.statistics.last_access = node.statistics.inserted_at = self.access_time
        self._register_node(node)
        return node

    def extend(
        self,
        above: DocumentNode,
        key: RadixKey,
        start: int,
        slots: torch.Tensor,
        cuts: Sequence[int],
        session_id: str | None,
    ) -> Extension:
        """Let the path to `above`, which the caller has locked, go on as `key` does.

        Args:
            above: The root, or a node on the device.
            key: From the root on, whole pages; where its namespace changes there is a cut.
            start: Where `above` ends in it.
            slots: [len(key) - start] int64: device slots of the tokens that follow. Those that
                the device doesn't have yet are the tree's from now on, and so is the tensor.
            cuts: Ascending positions in `key` at which what is new is cut into nodes.
            session_id: Of the request, for events.
        """
        node, first, length = above, start, len(key)
        found = Extension([], [], [])
        while first < length:
            run = run_at(key, first)
            child = node.children.get(child_key_at(run, first, self.page_size))
            if child is None:
                break
            matched = self._matched(child, run, first)
            if matched < child.statistics.tokens:
                child, action = self._split_node(child.key, child, matched)
                if action is not None:
                    found.actions.append(action)
            data = child.component_data[_FULL]
            if data.value is None:
                part = slots[first - start : first - start + matched]
                self._unevict_node_on_insert(child, part, session_id)
            else:
                found.known.append((first, first + matched, data.value))
            self.lock_below(child)
            found.nodes.append(child)
            node, first = child, first + matched
        for last in (*(cut for cut in cuts if first < cut < length), length):
            if last > first:
                tokens, part = run_at(key, first)[first:last], slots[first - start : last - start]
                node = self._add_locked(node, tokens, part, session_id)
                found.nodes.append(node)
                first = last
        return found

    def _add_locked(
        self, parent: DocumentNode, key: RadixKey, slots: torch.Tensor, session_id: str | None
    ) -> DocumentNode:
        """SGLang's `_add_new_node` and lock; its rank is up to who counts the request."""
        self.observer.node_added(parent, child_key := child_key_at(key, 0, self.page_size))
        node = self._new_node()
        node.parent, node.key = parent, key
        data = node.component_data[_FULL]
        # Its neighbours' slots stay in memory with its own, which the device has few of.
        data.value, data.lock_ref = slots, 1
        parent.children[child_key] = node
        node.on_device = True
        parent.device_children += 1
        statistics = node.statistics
        statistics.tokens = len(key)
        self.component_protected_size_[_FULL] += statistics.tokens
        if self._uses_largest and statistics.tokens > self._component.device.clock.largest_tokens:
            self._observe(node)
        if self.enable_storage:
            node.hash_value = compute_node_hash_values(node, self.page_size)
        self.kv_events.record_store(node, session_id=session_id)
        return node

    def _add_new_node(
        self, parent: DocumentNode, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> DocumentNode:
        """SGLang's, for inserts that don't come from a request's checkpoint."""
        self.observer.node_added(parent, key.child_key(self.page_size))
        node: DocumentNode = super()._add_new_node(parent, key, value, *args, **kwargs)
        node.statistics.tokens = len(key)
        self.rank(node)
        return node

    def insert_host(self, *args: Any, **kwargs: Any) -> Any:
        """SGLang's; a node that a storage backend brings comes in here."""
        result = super().insert_host(*args, **kwargs)
        if result.inserted_host_node is not None:
            node = self.node_by_id(result.inserted_host_node)
            if not node.statistics.tokens:
                self.observer.node_added(node.parent, node.key.child_key(self.page_size))
                node.statistics.tokens = len(node.key)
                self.rank(node)
                self.arrivals.append(node)
        return result

    # Splitting

    def split(self, node: DocumentNode, tokens: int) -> tuple[DocumentNode, Any]:
        """Cut `node` after `tokens`; return the new upper half and SGLang's action, if any.

        `node` keeps its id, locks and place at the bottom. Nothing is freed or copied.
        """
        return self._split_node(node.key, node, tokens)

    def _split_node(self, key: Any, child: DocumentNode, split_len: int) -> tuple[Any, Any]:
        """Both halves were used alike, so both keep all statistics; the lower half keeps the
        documents that end there."""
        upper, action = super()._split_node(key, child, split_len)
        upper.statistics = child.statistics.copy()
        upper.is_tail = child.is_tail
        self.holdings.tails -= not child.is_tail  # As which it was made.
        upper.matched = child.matched
        for document in child.unmarked_documents:
            self.note_unmarked(upper, document)
        if child.unmarked_forgotten:
            self.forget_names(upper)
        upper.host_copies = child.host_copies
        upper.host_reclaims = child.host_reclaims
        upper.keeps_host_copy = child.keeps_host_copy
        if child.mark is not None and self.marks is not None:
            upper.mark = self.marks.attach(upper, upper.hash_value[-1])
        upper.statistics.tokens = len(upper.key)
        child.statistics.tokens = len(child.key)
        # As of the last use: cutting a node is none.
        upper.ranks = list(child.ranks)
        self.offer(upper)
        self.splits += 1
        self.observer.node_split(upper, child)
        return upper, action
