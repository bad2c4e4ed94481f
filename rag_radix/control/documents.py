"""`GET /rag/documents`: the documents in the tree, sorted, a page at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from heapq import nlargest, nsmallest
from typing import TYPE_CHECKING, Any, TypeAlias

from rag_radix.errors import ControlError
from rag_radix.policies.base import TierName
from rag_radix.statistics import DocumentKey, namespace_name

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode, Occurrence

# Where a document ends, and as which one there.
Place: TypeAlias = "tuple[DocumentNode, Occurrence]"

# What a document is sorted by, with its id, version and namespace.
Found: TypeAlias = tuple[float, str, str, str]
# Actions and bodies for the schedulers, their answers, and what comes of them in the end.
Survey: TypeAlias = Generator[tuple[str, Any], list[Any], list[Any]]

LOOK_ACTION = "look_at_documents"
ROWS_ACTION = "documents"
# Names and documents that a scheduler looks at between two passes: about 10 ms.
LOOKED_AT = 3000
ROWS_AT_ONCE = 250
_ATTEMPTS = 3

SORTS = ("frequency", "id", "positions", "priority", "tokens")
DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
_MAX_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Page:
    """What of the documents is asked for.

    Attributes:
        sort: One of `SORTS`.
        descending: Largest first.
        offset, limit: Which of them, in that order.
        prefix: What their ids begin with.
        namespace: Only those of the namespace of this name; None for all.
    """

    sort: str = "frequency"
    descending: bool = True
    offset: int = 0
    limit: int = DEFAULT_LIMIT
    prefix: str = ""
    namespace: str | None = None

    def first_of(self, found: Sequence[Found]) -> list[Found]:
        """The first of `found`, up to the end of the page."""
        most = self.offset + self.limit
        if self.sort == "id":
            return (nlargest if self.descending else nsmallest)(most, found, key=_name)
        sign = -1 if self.descending else 1
        return nsmallest(most, found, key=lambda each: (sign * each[0], *each[1:]))


def _name(found: Found) -> tuple[str, str, str]:
    return found[1:]


def parse_page(query: Mapping[str, str]) -> Page:
    """Read the query of the route.

    Raises:
        ControlError: A name is unknown or a value wrong.
    """
    known = ("sort", "order", "offset", "limit", "prefix", "namespace")
    for name in query:
        if name not in known:
            raise ControlError(f"{name!r:.60} is unknown; known are {', '.join(known)}")
    sort = query.get("sort", "frequency")
    if sort not in SORTS:
        raise ControlError(f"sort={sort!r:.60} must be one of {', '.join(SORTS)}")
    order = query.get("order", "asc" if sort == "id" else "desc")
    if order not in ("asc", "desc"):
        raise ControlError(f"order={order!r:.60} must be asc or desc")
    return Page(
        sort=sort,
        descending=order == "desc",
        offset=parse_count(query, "offset", 0, 0, 1 << 31),
        limit=parse_count(query, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT),
        prefix=query.get("prefix", ""),
        namespace=query.get("namespace"),
    )


def parse_count(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A number of a query.

    Raises:
        ControlError: It isn't one between `least` and `most`.
    """
    text = query.get(name, str(default))
    # Python reads no number of very many digits, so it isn't asked to.
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not least <= int(text) <= most:
        raise ControlError(f"{name}={text!r:.60} must be a number from {least} to {most}")
    return int(text)


def survey(page: Page) -> Survey:
    """What the schedulers are asked for a page of the documents, a part of them at a time.

    A scheduler computes nothing while it looks, so it looks at a few thousand documents between
    two passes: first at what the page is sorted by, then at the page's documents.

    Yields:
        An action and its body, which the answers of all data-parallel ranks are sent for.

    Returns:
        What each rank has, and how many documents in all.
    """
    # Names that change places while this goes on would be missed or seen twice.
    for _ in range(_ATTEMPTS):
        generations: dict[int, set[int]] = {}
        totals: dict[int, int] = {}
        found: dict[int, list[Found]] = {}
        first, known = 0, 1
        while first < known:
            for part in (yield LOOK_ACTION, {"page": asdict(page), "first": first}):
                rank = part["rank"]
                generations.setdefault(rank, set()).add(part["generation"])
                totals[rank] = totals.get(rank, 0) + part["total"]
                found.setdefault(rank, []).extend(map(tuple, part["found"]))
                known = max(known, part["known"])
            first += LOOKED_AT
        if all(len(each) == 1 for each in generations.values()):
            break
    names = {
        rank: [each[1:] for each in page.first_of(found[rank])[page.offset :]]
        for rank in sorted(found)
    }
    rows: dict[int, list[Any]] = {rank: [] for rank in names}
    for first in range(0, max(map(len, names.values())), ROWS_AT_ONCE):
        part = {str(rank): names[rank][first : first + ROWS_AT_ONCE] for rank in names}
        for answer in (yield ROWS_ACTION, part):
            rows[answer["rank"]] += answer["rows"]
    return [
        {"total": totals[rank], "offset": page.offset, "documents": rows[rank]} for rank in names
    ]


def look(tree: KnowledgeTree, page: Page, first: int) -> dict[str, Any]:
    """What `page` is sorted by, of `LOOKED_AT` names of documents from `first` on, and how many
    of their documents there are."""
    places = tree.tree_core.places
    value, found = _sort_value(tree, page.sort), []
    namespace_of = cache(namespace_name)
    for name, nodes in places.named(first, first + LOOKED_AT):
        if name.startswith(page.prefix):
            for document, ends in _ends(tree, name, nodes).items():
                namespace = namespace_of(document.extra_key, document.cache_salt)
                if page.namespace in (None, namespace):
                    found.append((value(document, ends), name, document.version, namespace))
    return {
        "generation": places.generation,
        "known": len(places),
        "total": len(found),
        "found": page.first_of(found),
    }


def rows(tree: KnowledgeTree, names: Iterable[Sequence[str]]) -> list[dict[str, Any]]:
    """The documents of these ids, versions and namespaces that are still there."""
    found = []
    for id, version, namespace in names:
        for document, ends in _ends(tree, id, tree.tree_core.places.of(id)).items():
            if (document.version, document.namespace) == (version, namespace):
                found.append(_row(tree, document, ends))
    return found


def _ends(
    tree: KnowledgeTree, name: str, nodes: Iterable[DocumentNode]
) -> dict[DocumentKey, list[Place]]:
    """Where, among `nodes`, the documents of that id end that prompts could find."""
    ends: dict[DocumentKey, list[Place]] = {}
    for node in {each.id: each for each in nodes}.values():
        if tree.control.reaches(node):
            for occurrence in node.occurrences:
                if occurrence.document.id == name:
                    ends.setdefault(occurrence.document, []).append((node, occurrence))
    return ends


def _sort_value(tree: KnowledgeTree, sort: str) -> Callable[[DocumentKey, list[Place]], float]:
    by_name: dict[str, Callable[[DocumentKey, list[Place]], float]] = {
        "frequency": lambda document, _: tree.document_frequencies.hits(document)[2],
        "id": lambda *_: 0,
        "positions": lambda _, places: len(places),
        "priority": lambda _, places: max(_priority(node) for node, _ in places),
        "tokens": lambda _, places: max(occurrence.tokens for _, occurrence in places),
    }
    return by_name[sort]


def chain(node: DocumentNode, occurrence: Occurrence) -> list[DocumentNode]:
    """The nodes of a document that ends at `node`, first to last."""
    found, tokens = [node], len(node.key)
    while tokens < occurrence.tokens:
        node = node.parent
        found.append(node)
        tokens += len(node.key)
    found.reverse()
    return found


def _row(tree: KnowledgeTree, document: DocumentKey, places: list[Place]) -> dict[str, Any]:
    nodes = {above.id: above for node, each in places for above in chain(node, each)}.values()
    device_hits, host_hits, retrievals = tree.document_frequencies.hits(document)
    return {
        "id": document.id,
        "version": document.version,
        "namespace": document.namespace,
        "tier": "device" if any(node.on_device for node, _ in places) else "host",
        "tokens": max(occurrence.tokens for _, occurrence in places),
        "device_tokens": _tokens(node for node in nodes if node.on_device),
        "host_tokens": _tokens(node for node in nodes if node.backuped),
        "frequency": retrievals,
        "priority": max(_priority(node) for node, _ in places),
        "device_hits": device_hits,
        "host_hits": host_hits,
        "positions": len(places),
        "pinned": tree.control.is_pinned(document),
    }


def _tokens(nodes: Iterable[DocumentNode]) -> int:
    return sum(len(node.key) for node in nodes)


def _priority(node: DocumentNode) -> float:
    tier = TierName.DEVICE if node.on_device else TierName.HOST
    return node.ranks[tier].priority
