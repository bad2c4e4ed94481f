"""`GET /rag/documents`: the documents in the tree, sorted, a page at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from typing import TYPE_CHECKING, Any, TypeAlias

from rag_radix.errors import ControlError
from rag_radix.policies.base import TierName
from rag_radix.statistics import DocumentKey

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode, Occurrence

# Where a document ends, and as which one there.
Place: TypeAlias = "tuple[DocumentNode, Occurrence]"

SORTS = ("frequency", "id", "positions", "priority", "tokens")
DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


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
    if not (text.isascii() and text.isdigit()) or not least <= int(text[:12]) <= most:
        raise ControlError(f"{name}={text!r:.60} must be a number from {least} to {most}")
    return int(text)


def documents(tree: KnowledgeTree, page: Page) -> dict[str, Any]:
    """A page of the documents that are in the tree, and how many there are. O(nodes)."""
    places: dict[DocumentKey, list[Place]] = {}
    for node in tree.control.reachable():
        for occurrence in node.occurrences:
            document = occurrence.document
            if not document.id.startswith(page.prefix):
                continue
            if page.namespace is not None and page.namespace != document.namespace:
                continue
            places.setdefault(document, []).append((node, occurrence))
    value, sign = _sort_value(tree, page.sort), -1 if page.descending else 1

    def rank(document: DocumentKey) -> tuple[Any, ...]:
        name = (document.id, document.version, document.namespace)
        return name if page.sort == "id" else (sign * value(document, places[document]), *name)

    most = page.offset + page.limit
    if page.sort == "id" and page.descending:
        chosen = nlargest(most, places, key=rank)
    else:
        chosen = nsmallest(most, places, key=rank)
    return {
        "total": len(places),
        "offset": page.offset,
        "documents": [_row(tree, document, places[document]) for document in chosen[page.offset :]],
    }


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
