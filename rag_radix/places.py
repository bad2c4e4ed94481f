"""Where in the tree documents are, by id, so that nobody has to look through all of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rag_radix.node import DocumentNode

# Entries per node from which on those of nodes that are gone are thrown out, unless most are live.
_MOST_PER_NODE = 3
_FEWEST = 4096


class Places:
    """An index of the nodes at which documents end, or lie without a node of their own.

    What leaves the tree is thrown out now and then only, so who asks must look at the nodes.

    Attributes:
        generation: Changes when names change places in it.

    Args:
        nodes: All nodes by their ids, whose number is known.
    """

    def __init__(self, nodes: Callable[[], Collection[DocumentNode]]) -> None:
        self._nodes = nodes
        self._by_document: dict[str, list[DocumentNode]] = {}
        # Documents end there whose names aren't known any more.
        self._unknown: dict[int, DocumentNode] = {}
        self._entries = 0
        self._live_at_rebuild = 0
        self.generation = 0

    def __len__(self) -> int:
        """How many names there are, those of documents that are gone included."""
        return len(self._by_document)

    def add(self, document_id: str, node: DocumentNode) -> None:
        """A document of that id is at `node`."""
        self._by_document.setdefault(document_id, []).append(node)
        self._count()

    def add_unknown(self, node: DocumentNode) -> None:
        """Documents may be at `node` under any id."""
        if node.id not in self._unknown:
            self._unknown[node.id] = node
            self._count()

    def of(self, document_id: str) -> Iterator[DocumentNode]:
        """The nodes of the documents of that id, and those where any may be. Some may be gone; none
        comes twice."""
        return self._once(self._by_document.get(document_id, []))

    def beginning_with(self, prefix: str) -> Iterator[DocumentNode]:
        """Likewise, of all documents whose ids begin with `prefix`. O(documents)."""
        named = self._by_document
        return self._once(node for name in named if name.startswith(prefix) for node in named[name])

    def named(self, first: int, last: int) -> Iterator[tuple[str, list[DocumentNode]]]:
        """The names from `first` to `last`, half-open, each with its nodes; some of these may be
        gone, and one may come twice. New names are the last ones."""
        return islice(self._by_document.items(), first, last)

    def _once(self, found: Iterable[DocumentNode]) -> Iterator[DocumentNode]:
        yield from {node.id: node for node in (*found, *self._unknown.values())}.values()

    def clear(self) -> None:
        """All nodes are gone."""
        self.generation += 1
        self._by_document.clear()
        self._unknown.clear()
        self._entries = self._live_at_rebuild = 0

    def _count(self) -> None:
        self._entries += 1
        if (
            self._entries > _FEWEST
            and self._entries > 2 * self._live_at_rebuild
            and self._entries > _MOST_PER_NODE * len(self._nodes())
        ):
            self._rebuild()

    def _rebuild(self) -> None:
        self.clear()
        for node in self._nodes():
            documents = [*(each.document for each in node.occurrences), *node.unmarked_documents]
            for name in dict.fromkeys(document.id for document in documents):
                self._by_document.setdefault(name, []).append(node)
                self._entries += 1
            if node.names_forgotten:
                self._unknown[node.id] = node
                self._entries += 1
        self._live_at_rebuild = self._entries
