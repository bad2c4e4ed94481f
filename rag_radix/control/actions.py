"""What a scheduler does with operators' calls; their bodies were checked by `routes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rag_radix.control.documents import Page, documents
from rag_radix.control.selector import Selector
from rag_radix.control.tree_view import View, tree_view

DOCUMENTS_ACTION = "documents"
TREE_ACTION = "tree"
INVALIDATE_ACTION = "invalidate"


def _documents(scheduler: Any, page: dict[str, Any]) -> dict[str, Any]:
    return documents(scheduler.tree_cache, Page(**page))


def _tree(scheduler: Any, view: dict[str, Any]) -> dict[str, Any]:
    return tree_view(scheduler.tree_cache, View(**view))


def _invalidate(scheduler: Any, selector: dict[str, Any]) -> dict[str, Any]:
    removed: dict[str, Any] = scheduler.tree_cache.control.invalidate(
        Selector(**selector)
    ).as_json()
    return removed


ACTIONS: dict[str, Callable[[Any, Any], Any]] = {
    DOCUMENTS_ACTION: _documents,
    TREE_ACTION: _tree,
    INVALIDATE_ACTION: _invalidate,
}
