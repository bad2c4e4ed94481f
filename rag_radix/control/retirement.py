"""Invalidation: documents leave every tier, and what is being computed with them stays out.

A document is retired at every place where it stands, with all that hangs below it, whose KV
has attended to it. Its topmost node is hidden first: it gets a namespace that no prompt has, so
from then on nothing finds it, is inserted below it or is loaded back from it, while SGLang's
book-keeping of locks, slots and leaves goes on as before. What nobody uses is dropped at once, the
rest when its last request ends, its copy is done or its load has arrived.

A request that is computing when that happens, and has one of the documents in its prompt or
stands on hidden nodes, ends with its answer, but nothing more of it is published: SGLang knows such
requests (`skip_radix_cache_insert`), and frees all of their own slots at their end.

Ranks retire alike: the call comes to each of them between the same two passes, and all else
follows from the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from rag_radix.control.documents import chain
from rag_radix.control.selector import Selector
from rag_radix.sglang_compat import DriveHostEvictionResult, RadixKey, device_bytes_per_token
from rag_radix.statistics import namespace_name
from rag_radix.storage.removal import StoredRemoval

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode

PATHS_REPORTED = 100


class RetiredNamespace(str):
    """A namespace that equals no other, whatever it is called."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__


@dataclass(slots=True)
class Amount:
    """KV in both tiers."""

    nodes: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    bytes: int = 0

    def add(self, node: DocumentNode, bytes_per_token: int) -> None:
        tokens = len(node.key)
        self.nodes += 1
        self.device_tokens += tokens * node.on_device
        self.host_tokens += tokens * bool(node.backuped)
        self.bytes += tokens * (node.on_device + bool(node.backuped)) * bytes_per_token


@dataclass(slots=True)
class Removed:
    """What an invalidation has removed.

    Attributes:
        places: Places in the tree at which something was removed.
        paths: Up to `PATHS_REPORTED` of them: the ids of the documents from the root down.
        freed: Dropped at once.
        in_use: Dropped when the requests and copies end that use it; no request finds it.
        requests: Requests in progress that publish no more.
        storage: Its files, where storage is of files of ours.
    """

    places: int = 0
    paths: list[list[str]] = field(default_factory=list)
    freed: Amount = field(default_factory=Amount)
    in_use: Amount = field(default_factory=Amount)
    requests: int = 0
    storage: StoredRemoval | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class RetirementCounters:
    """Since start.

    Attributes:
        calls: Invalidations.
        nodes: Nodes dropped by them.
        tokens: Their tokens, on device or host.
        unpublished_requests: Requests in progress that published no more.
    """

    calls: int = 0
    nodes: int = 0
    tokens: int = 0
    unpublished_requests: int = 0


class Retirement:
    """The retired nodes of a tree, and the requests that may hold KV of documents to come.

    Attributes:
        counters: What has been retired.
    """

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self.counters = RetirementCounters()
        # Only asked whether they are to be marked, so their order doesn't matter.
        self._started: WeakSet[Any] = WeakSet()
        self._tops: dict[int, DocumentNode] = {}
        self._numbers = count()

    def started(self, reqs: Iterable[Any]) -> None:
        """`reqs` begin or go on to prefill: from now on they may hold KV."""
        self._started.update(reqs)

    def is_retired(self, node: DocumentNode) -> bool:
        """Whether `node` is the topmost of what nothing finds any more."""
        return node.id in self._tops

    @property
    def hides_some(self) -> bool:
        """Whether retired nodes wait for their last user."""
        return bool(self._tops)

    def retired_nodes(self) -> int:
        """Nodes that wait for their last user."""
        return sum(1 for top in self._tops.values() for _ in subtree(top))

    def retire(self, selector: Selector) -> Removed:
        """Let the documents that `selector` means be found no more, and drop what is unused."""
        core, removed = self._tree.tree_core, Removed()
        tops = self._find(selector)
        removed.places = len(tops)
        removed.paths = [self._path(top) for top in tops[:PATHS_REPORTED]]
        hidden = self._hide(tops)
        for req in self._started:
            if not req.skip_radix_cache_insert and self._concerns(req, selector, hidden):
                req.skip_radix_cache_insert = True
                removed.requests += 1
        self._tree.control.retired(tops)
        below = [node for top in tops for node in subtree(top)]
        removed.storage = self._tree.storing.retire(selector, below)
        bytes_per_token = device_bytes_per_token(self._tree)
        for top in tops:
            for node in subtree(top):
                amount = removed.in_use if core.is_in_use(node) else removed.freed
                amount.add(node, bytes_per_token)
        self.sweep()
        self.counters.calls += 1
        self.counters.unpublished_requests += removed.requests
        return removed

    def lose(self, nodes: Sequence[DocumentNode]) -> None:
        """Let `nodes`, whose KV is wrong, and what is below them be found no more, and drop what
        is unused. Requests that stand on them have read them before."""
        among = {**self._tops, **{node.id: node for node in nodes}}
        tops = [
            node for node in nodes if node.id not in self._tops and not self._is_below(node, among)
        ]
        hidden = self._hide(tops)
        for req in self._started if hidden else ():
            path = () if req.lock is None else self._tree.tree_core.path_to(req.lock.node)
            if any(node.id in hidden for node in path):
                req.skip_radix_cache_insert = True
        self._tree.control.retired(tops)
        self.sweep()

    def _hide(self, tops: Iterable[DocumentNode]) -> set[int]:
        """Let nothing find `tops` any more; returns the ids of all that is hidden by it."""
        core = self._tree.tree_core
        hidden: set[int] = set()
        for top in tops:
            nodes = list(subtree(top))
            hidden.update(node.id for node in nodes)
            namespace = RetiredNamespace(f"retired {next(self._numbers)}")
            core.hide(top, RadixKey(top.key.token_ids, namespace, cache_salt=top.key.cache_salt))
            for node in nodes:
                core.observer.node_changed(node)
            self._tops[top.id] = top
        return hidden

    def sweep(self) -> None:
        """Drop what of the retired nodes has no user any more."""
        core = self._tree.tree_core
        for top in list(self._tops.values()):
            if core.has_node(top.id):
                result = DriveHostEvictionResult()
                dropped = core.drop_unused(list(subtree(top)), result)
                self._tree._apply_eviction_result(result)
                self.counters.nodes += len(dropped)
                self.counters.tokens += sum(len(node.key) for node in dropped)
            if not core.has_node(top.id):
                del self._tops[top.id]

    def reset(self) -> None:
        """All nodes are gone."""
        self._tops.clear()

    def reaches(self, node: DocumentNode) -> bool:
        """Whether `node` is in the tree and a prompt could find it."""
        is_there = self._tree.tree_core.has_node(node.id)
        return is_there and not (self._tops and self._is_below(node, self._tops, itself=True))

    def places(self, selector: Selector) -> Iterator[DocumentNode]:
        """The reachable nodes at which documents may be that `selector` means."""
        core = self._tree.tree_core
        if selector.prefix is None:
            found = core.places.of(selector.id or "")
        else:
            found = core.places.beginning_with(selector.prefix)
        return filter(self.reaches, found)

    def _stays(self, node: DocumentNode, selector: Selector) -> bool:
        """Whether `node` is part of a document that stays."""
        stack = [(node, len(node.key))]
        while stack:
            node, tokens = stack.pop()
            if node.id in self._tops:
                continue
            if not _goes(node, selector) and any(
                occurrence.tokens >= tokens for occurrence in node.occurrences
            ):
                return True
            stack += [(child, tokens + len(child.key)) for child in node.children.values()]
        return False

    def _find(self, selector: Selector) -> list[DocumentNode]:
        """The topmost nodes of what is to go, none below another."""
        if selector.is_all:
            return list(self._topmost_of(selector.namespace))
        named: list[list[DocumentNode]] = []  # a chain for each place of a document that goes
        for node in self.places(selector):
            # One that lies here may be among those whose names are forgotten.
            if node.names_forgotten or any(map(selector.matches, node.unmarked_documents)):
                named.append([node])
            if _goes(node, selector):
                named += [chain(node, occurrence) for occurrence in node.occurrences]
        # Documents that begin alike share a head, which stays for those that stay.
        tops = {}
        for nodes in named:
            top = next((node for node in nodes if not self._stays(node, selector)), nodes[-1])
            tops[top.id] = top
        return [top for top in tops.values() if not self._is_below(top, tops)]

    def _topmost_of(self, namespace: str | None) -> Iterator[DocumentNode]:
        """The topmost nodes of a namespace; None is every one."""
        name = cache(namespace_name)
        stack: list[DocumentNode] = [self._tree.tree_core.root_node]
        while stack:
            for child in stack.pop().children.values():
                if child.id in self._tops:
                    continue
                key = child.key
                if namespace is None or namespace == name(key.extra_key, key.cache_salt):
                    yield child
                else:
                    stack.append(child)

    def _is_below(
        self, node: DocumentNode, tops: dict[int, DocumentNode], *, itself: bool = False
    ) -> bool:
        parent = node if itself else node.parent
        while parent is not None:
            if parent.id in tops:
                return True
            parent = parent.parent
        return False

    def _concerns(self, req: Any, selector: Selector, hidden: set[int]) -> bool:
        """Whether `req` has, or is computing, KV of what is retired."""
        if req.lock is None and not req.kv.holds_kv:
            return False
        own = namespace_name(req.extra_key, req.cache_salt)
        if selector.is_all and selector.namespace in (None, own):
            return True
        retrieval = self._tree.speculations.retrieval(req)
        indices = range(len(retrieval.annotation.documents))
        if any(selector.matches(retrieval.document_key(index)) for index in indices):
            return True
        path = () if req.lock is None else self._tree.tree_core.path_to(req.lock.node)
        return any(node.id in hidden for node in path)

    def _path(self, top: DocumentNode) -> list[str]:
        """The documents from the root down to the ones that end at `top` or begin there."""
        path: list[str] = []
        for node in self._tree.tree_core.path_to(top.id):
            path += [node.occurrences[-1].document.id] if node.occurrences else []
        if not top.occurrences:
            below = (each for each in subtree(top) if each.occurrences)
            path += [each.occurrences[-1].document.id for each in list(below)[:1]]
        return path


def _goes(node: DocumentNode, selector: Selector) -> bool:
    """Whether a document that ends at `node` goes, or may."""
    return node.names_forgotten or any(
        selector.matches(occurrence.document) for occurrence in node.occurrences
    )


def subtree(top: DocumentNode) -> Iterator[DocumentNode]:
    """`top` and all below it, parents before their children."""
    nodes = [top]
    for node in nodes:
        yield node
        nodes += node.children.values()
