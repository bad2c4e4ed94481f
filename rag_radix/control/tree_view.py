"""`GET /rag/tree`: the tree from its root, down to a depth and up to a size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from heapq import nlargest
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from rag_radix.control.documents import parse_count
from rag_radix.errors import ControlError
from rag_radix.policies.base import TierName
from rag_radix.sglang_compat import ComponentType
from rag_radix.statistics import namespace_name

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode

MAX_DEPTH = 64
# The scheduler computes nothing meanwhile: about 5 ms.
MAX_NODES = 1000
# Children, of all nodes: 2 ms, and 2 more where a namespace is asked for.
_CONSIDERED = 10_000

_Name = Callable[[str | None, str | None], str]


@dataclass(frozen=True, slots=True)
class View:
    """How much of the tree is asked for.

    Attributes:
        depth: Nodes from the root downwards.
        nodes: In all; those nearest to the root come first, and of siblings those that were
            used most.
        namespace: Only what requests of the namespace of this name may find: its nodes, and those
            without a salt or key; None for all.
    """

    depth: int = 4
    nodes: int = 200
    namespace: str | None = None


def parse_view(query: Mapping[str, str]) -> View:
    """Read the query of the route.

    Raises:
        ControlError: A name is unknown or a value wrong.
    """
    for name in query:
        if name not in ("depth", "nodes", "namespace"):
            raise ControlError(f"{name!r:.60} is unknown; known are depth, nodes, namespace")
    default = View()
    return View(
        depth=parse_count(query, "depth", default.depth, 1, MAX_DEPTH),
        nodes=parse_count(query, "nodes", default.nodes, 1, MAX_NODES),
        namespace=query.get("namespace"),
    )


def tree_view(tree: KnowledgeTree, view: View) -> dict[str, Any]:
    """The tree as nested objects; `hidden_children` counts those that were left out.

    Where there are very many children, only the oldest are considered: what has been kept longest.
    """
    root: DocumentNode = tree.tree_core.root_node
    name = cache(namespace_name)
    shown: dict[str, Any] = {"children": [], "hidden_children": 0}
    left, considered = view.nodes, _CONSIDERED
    queue = deque([(root, shown, 0)])
    while queue:
        node, parent, depth = queue.popleft()
        oldest = list(islice(node.children.values(), considered))
        considered -= len(oldest)
        children = _shown(tree, oldest, view.namespace, name)
        kept = _most_used(children, left) if depth < view.depth else []
        left -= len(kept)
        others = len(node.children) - len(oldest)
        parent["hidden_children"] = others + len(children) - len(kept)
        for child in kept:
            entry = _entry(tree, child, name)
            parent["children"].append(entry)
            queue.append((child, entry, depth + 1))
    return {"nodes": view.nodes - left, "tree": shown}


def _shown(
    tree: KnowledgeTree, children: list[DocumentNode], namespace: str | None, name: _Name
) -> list[DocumentNode]:
    """Those of `children` that a view of the namespace has."""
    if tree.control.hides_some:
        children = [child for child in children if not tree.control.is_retired(child)]
    if namespace is not None:
        children = [
            child
            for child in children
            if name(child.key.extra_key, child.key.cache_salt) in ("", namespace)
        ]
    return children


def _most_used(children: list[DocumentNode], most: int) -> list[DocumentNode]:
    """Up to `most` of them, the most used first, of those used alike the oldest."""
    frequencies = [child.statistics.frequency for child in children]
    # Not by a key of two numbers for each child, which would cost as much as all else.
    least = min(nlargest(most, frequencies), default=inf)
    places = [place for place, each in enumerate(frequencies) if each > least]
    places.sort(key=frequencies.__getitem__, reverse=True)  # which keeps the oldest first
    alike = (place for place, each in enumerate(frequencies) if each == least)
    places += islice(alike, most - len(places))
    return [children[place] for place in places]


def _entry(tree: KnowledgeTree, node: DocumentNode, name: _Name) -> dict[str, Any]:
    data = node.component_data[ComponentType.FULL]
    tier = TierName.DEVICE if node.on_device else TierName.HOST
    return {
        "node": node.id,
        "documents": [
            {"id": each.document.id, "version": each.document.version, "tokens": each.tokens}
            for each in node.occurrences
        ],
        "namespace": name(node.key.extra_key, node.key.cache_salt),
        "tokens": len(node.key),
        "device": node.on_device,
        "host": bool(node.backuped),
        "tail": node.is_tail,
        "frequency": node.statistics.frequency,
        "priority": node.ranks[tier].priority,
        "locked": data.lock_ref > 0,
        "children": [],
        "hidden_children": 0,
    }
