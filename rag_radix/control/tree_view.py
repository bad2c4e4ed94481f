"""`GET /rag/tree`: the tree from its root, down to a depth and up to a size."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
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
MAX_NODES = 5000


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
    """The tree as nested objects; `hidden_children` counts those that were left out."""
    root: DocumentNode = tree.tree_core.root_node
    shown: dict[str, Any] = {"children": [], "hidden_children": 0}
    left = view.nodes
    queue = deque([(root, shown, 0)])
    while queue:
        node, parent, depth = queue.popleft()
        children = [
            child
            for child in node.children.values()
            if not tree.control.is_retired(child) and _is_in(view.namespace, child)
        ]
        children.sort(key=lambda child: (-child.statistics.frequency, child.id))
        kept = children[:left] if depth < view.depth else []
        left -= len(kept)
        parent["hidden_children"] = len(children) - len(kept)
        for child in kept:
            entry = _entry(tree, child)
            parent["children"].append(entry)
            queue.append((child, entry, depth + 1))
    return {"nodes": view.nodes - left, "tree": shown}


def _is_in(namespace: str | None, node: DocumentNode) -> bool:
    return namespace is None or _namespace(node) in ("", namespace)


def _namespace(node: DocumentNode) -> str:
    return namespace_name(node.key.extra_key, node.key.cache_salt)


def _entry(tree: KnowledgeTree, node: DocumentNode) -> dict[str, Any]:
    data = node.component_data[ComponentType.FULL]
    tier = TierName.DEVICE if node.on_device else TierName.HOST
    return {
        "node": node.id,
        "documents": [
            {"id": each.document.id, "version": each.document.version, "tokens": each.tokens}
            for each in node.occurrences
        ],
        "namespace": _namespace(node),
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
