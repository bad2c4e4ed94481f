"""What must go: documents that are read no more, from files, marks and what is under way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rag_radix.control.selector import Selector
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode
    from rag_radix.storage.files import SegmentFiles
    from rag_radix.storage.marks import Marks
    from rag_radix.storage.segment import Name


def remove(
    tree: KnowledgeTree,
    marks: Marks,
    files: SegmentFiles | None,
    selector: Selector,
    nodes: Iterable[DocumentNode],
) -> None:
    """Let the documents that `selector` means be read no more.

    Args:
        nodes: What has gone from the tree by it.
    """
    # They may be reading what goes.
    for request in list(tree.ongoing_prefetch):
        tree.release_aborted_request(request)
    pages: list[str] = []
    for node in nodes:
        pages += node.hash_value or ()
        if node.mark is not None:
            marks.remove(node.mark.key)
            node.mark = None
    if files is not None:
        files.look()
    if selector.is_everything:
        marks.clear()
        if files is not None:
            files.clear()
        return
    if selector.is_all and selector.namespace is not None:
        for mark in marks:
            if mark.node is None and mark.namespace == selector.namespace:
                marks.remove(mark.key)
        if files is not None:
            files.discard_namespace(selector.namespace)
    absent = _Absent(marks, selector, tree.page_size)
    ends: list[tuple[str, int]] = []
    for mark in marks.absent(selector):
        found = absent.ends(mark.key, mark.pages, mark.names)
        if mark.names_forgotten:
            found.append((mark.key, mark.pages))
        if found:
            marks.remove(mark.key)  # by what all ranks know alike
        ends += found
    if files is not None:
        for id in selector.ids(files.documents()):
            for key, length, names in files.named(id):
                ends += absent.ends(key, length, names)
        files.discard(pages)
        files.discard_documents(ends, lambda page: absent.keeps(page, files.names_at(page)))


class _Absent:
    """What a selector means of nodes that aren't in the tree."""

    def __init__(self, marks: Marks, selector: Selector, page_size: int) -> None:
        self._marks = marks
        self._selector = selector
        self._page_size = page_size

    def ends(self, key: str, pages: int, names: Iterable[Name]) -> list[tuple[str, int]]:
        """Where documents end that go, and how many pages go with each, of a node of `pages`
        whose last one is `key`."""
        mark = self._marks.get(key)
        if mark is not None and mark.node is not None:
            return []  # the tree has decided
        return [
            (key, -(-name.tokens // self._page_size) or pages)
            for name in names
            if self._selector.matches(name)
        ]

    def keeps(self, page: str, names: Iterable[Name]) -> bool:
        """Whether a document ends with `page`, of files with these `names`, that stays."""
        mark = self._marks.get(page)
        if mark is not None and mark.node is not None:
            return True
        known = () if mark is None else mark.names
        return any(not self._selector.matches(name) for name in (*names, *known))
