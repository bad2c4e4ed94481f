"""What is known of the nodes that are stored, whether they are in the tree now or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rag_radix.policies.base import Rank, TierName
from rag_radix.statistics import DocumentKey, NodeStatistics, namespace_name
from rag_radix.storage.segment import Name

if TYPE_CHECKING:
    from rag_radix.control.selector import Selector
    from rag_radix.node import DocumentNode

# About half a kilobyte each.
_CAPACITY = 65_536


class Mark:
    """A node that is stored, known by the hash of its last page.

    While the node is in the tree, all is read from there; what it was when it left is kept. Other
    threads read while the scheduler lets nodes leave.

    Attributes:
        key: The hash.
        node: The node, while it is in the tree.
    """

    __slots__ = (
        "_forgotten",
        "_names",
        "_namespace",
        "_owner",
        "_pages",
        "_path",
        "_ranks",
        "_statistics",
        "key",
        "node",
    )

    def __init__(self, key: str, owner: Marks) -> None:
        self.key = key
        self._owner = owner
        self.node: DocumentNode | None = None
        self._pages = 1
        self._namespace = ""
        self._names: tuple[Name, ...] = ()
        self._forgotten = False
        self._statistics = NodeStatistics()
        self._path: bytes | None = None
        self._ranks: list[Rank] = []

    @property
    def names(self) -> tuple[Name, ...]:
        node = self.node
        if node is None:
            return self._names
        marked = [_name(o.document, o.tokens) for o in node.occurrences]
        unmarked = [_name(document, 0) for document in node.unmarked_documents]
        return tuple(dict.fromkeys((*self._names, *marked, *unmarked)))

    def also_named(self, names: Iterable[Name]) -> None:
        self._names = tuple(dict.fromkeys((*self._names, *names)))

    @property
    def pages(self) -> int:
        node = self.node
        return self._pages if node is None else len(node.hash_value)

    @property
    def names_forgotten(self) -> bool:
        """Whether more documents end here than are known."""
        node = self.node
        return self._forgotten or (node is not None and node.names_forgotten)

    @property
    def statistics(self) -> NodeStatistics:
        node = self.node
        return self._statistics if node is None else node.statistics

    @property
    def path(self) -> bytes | None:
        """That of its history, if it has one that outlives it."""
        history = self.statistics.history
        return self._path if history is None else history.path

    @property
    def priority(self) -> float:
        """On host, as of its last use."""
        node = self.node
        ranks = self._ranks if node is None else node.ranks
        return ranks[TierName.HOST].priority if ranks else 0.0

    def left(self) -> None:
        """The node leaves the tree, or may not be stored any more."""
        node = self.node
        if node is not None:
            self._names, self._forgotten = self.names, self.names_forgotten
            self._pages, self._namespace = self.pages, self.namespace
            self._path = self.path
            self._statistics, self._ranks = node.statistics.copy(), node.ranks
            self._statistics.history = None  # found again by the path
            self.node = None
            self._owner.left(self)

    @property
    def namespace(self) -> str:
        """Name of the one that the node is in."""
        node = self.node
        if node is None:
            return self._namespace
        return namespace_name(node.key.extra_key, node.key.cache_salt)

    def as_json(self) -> dict[str, Any]:
        statistics = self.statistics
        return {
            "key": self.key,
            "pages": self.pages,
            "names": self.names,
            "namespace": self.namespace,
            "forgotten": self.names_forgotten,
            "priority": self.priority,
            "frequency": statistics.frequency,
            "document_frequency": statistics.document_frequency,
            "cost_per_token_s": statistics.cost_per_token_s,
            "cost_samples": statistics.cost_samples,
            "path": None if self.path is None else self.path.hex(),
        }

    @classmethod
    def of_json(cls, fields: Mapping[str, Any], owner: Marks) -> Mark:
        """Raises KeyError, TypeError or ValueError where something else was written."""
        mark = cls(str(fields["key"]), owner)
        mark._pages = int(fields["pages"])
        mark._namespace = str(fields["namespace"])
        mark._names = tuple(
            Name(str(id), str(version), str(namespace), int(tokens))
            for id, version, namespace, tokens in fields["names"]
        )
        mark._forgotten = bool(fields["forgotten"])
        mark._ranks = [Rank(float(fields["priority"]), float(fields["priority"]))] * len(TierName)
        mark._statistics = NodeStatistics(
            frequency=int(fields["frequency"]),
            document_frequency=int(fields["document_frequency"]),
            cost_per_token_s=float(fields["cost_per_token_s"]),
            cost_samples=int(fields["cost_samples"]),
        )
        path = fields.get("path")
        mark._path = None if path is None else bytes.fromhex(path)
        return mark


def _name(document: DocumentKey, tokens: int) -> Name:
    return Name(document.id, document.version, document.namespace, tokens)


class Marks:
    """All of them; the oldest are forgotten beyond a number."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._marks: OrderedDict[str, Mark] = OrderedDict()
        # Of nodes that aren't in the tree: keys by document.
        self._named: dict[str, dict[str, None]] = {}
        self._unclear: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def __iter__(self) -> Iterator[Mark]:
        return iter(list(self._marks.values()))

    def get(self, key: str) -> Mark | None:
        return self._marks.get(key)

    def add(self, mark: Mark) -> None:
        self.remove(mark.key)
        self._marks[mark.key] = mark
        self._marks.move_to_end(mark.key)
        if len(self._marks) > self._capacity:
            self.remove(next(iter(self._marks)))

    def attach(self, node: DocumentNode, key: str) -> Mark:
        """`node`, which ends with the page `key`, is stored and in the tree."""
        mark = self._marks.get(key)
        if mark is None or mark.node is not None:
            mark = Mark(key, self)
            self.add(mark)
        self._not_absent(mark)
        mark.node = node
        return mark

    def left(self, mark: Mark) -> None:
        """The node of `mark` has left the tree, or isn't there yet."""
        if self._marks.get(mark.key) is mark:
            for name in mark.names:
                self._named.setdefault(name.id, {})[mark.key] = None
            if mark.names_forgotten:
                self._unclear[mark.key] = None

    def also_named(self, key: str, names: Iterable[Name]) -> None:
        """The node that ends with the page `key` has these documents, too."""
        mark = self._marks.get(key)
        if mark is None:
            mark = Mark(key, self)
            self.add(mark)
        mark.also_named(names)
        if mark.node is None:
            self.left(mark)

    def absent(self, selector: Selector) -> list[Mark]:
        """Of nodes that aren't in the tree those that `selector` may mean."""
        keys = dict(self._unclear)
        for id in selector.ids(self._named):
            keys.update(self._named.get(id, {}))
        return [self._marks[key] for key in keys]

    def remove(self, key: str) -> None:
        mark = self._marks.pop(key, None)
        if mark is not None and mark.node is None:
            self._not_absent(mark)

    def _not_absent(self, mark: Mark) -> None:
        """`mark`, which has no node, is to be had by its names no more."""
        self._unclear.pop(mark.key, None)
        for name in mark.names:
            if (keys := self._named.get(name.id)) is not None:
                keys.pop(mark.key, None)
                if not keys:
                    del self._named[name.id]

    def clear(self) -> None:
        self._marks.clear()
        self._named.clear()
        self._unclear.clear()

    def priority(self, key: str) -> float:
        """Of a node by its last page; the lowest there is where nothing is known."""
        mark = self._marks.get(key)
        return 0.0 if mark is None else mark.priority

    def tree_reset(self) -> None:
        for mark in self._marks.values():
            mark.left()
