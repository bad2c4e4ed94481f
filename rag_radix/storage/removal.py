"""What must go: documents that are read no more, from files, marks and what is under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rag_radix.control.selector import Selector
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode
    from rag_radix.storage.files import SegmentFiles
    from rag_radix.storage.marks import Marks
    from rag_radix.storage.segment import Name


@dataclass(frozen=True, slots=True)
class StoredRemoval:
    """What has become of the files of what must go, on the rank where most of them are.

    Attributes:
        directory: Of all ranks' files.
        files: Removed, or emptied where they couldn't be.
        left_files: That are there with all that is in them, of this call or of what had to go
            before: they are read no more by this server, but by whoever starts next.
        is_read: Whether it is known which files there are.
    """

    directory: str
    files: int
    left_files: int
    is_read: bool

    @property
    def is_whole(self) -> bool:
        return self.is_read and not self.left_files


def remove(
    tree: KnowledgeTree,
    marks: Marks,
    files: SegmentFiles | None,
    selector: Selector,
    nodes: Iterable[DocumentNode],
) -> StoredRemoval | None:
    """Let the documents that `selector` means be read no more.

    Args:
        nodes: What has gone from the tree by it.

    Returns: What has become of their files, the same on all ranks; None where they are SGLang's.
    """
    if files is None:
        _remove(tree, marks, None, selector, nodes)
        return None
    gone_files = files.gone_files
    is_read = _remove(tree, marks, files, selector, nodes)
    most = torch.tensor([files.gone_files - gone_files, files.left_files, int(not is_read)])
    tree._all_reduce_attn_groups(most, torch.distributed.ReduceOp.MAX)
    gone, left, unread = most.tolist()
    return StoredRemoval(str(files.directory.parent), gone, left, not unread)


def _remove(
    tree: KnowledgeTree,
    marks: Marks,
    files: SegmentFiles | None,
    selector: Selector,
    nodes: Iterable[DocumentNode],
) -> bool:
    """Returns: Whether the directory could be read."""
    # They may be reading what goes.
    for request in list(tree.ongoing_prefetch):
        tree.release_aborted_request(request)
    pages: list[str] = []
    for node in nodes:
        pages += node.hash_value or ()
        if node.mark is not None:
            marks.remove(node.mark.key)
            node.mark = None
    is_read = files is None or files.look()
    if selector.is_everything:
        marks.clear()
        if files is not None:
            files.clear()
        return is_read
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
    return is_read


class _Absent:
    """What a selector means of nodes that aren't in the tree, or not under all their names."""

    def __init__(self, marks: Marks, selector: Selector, page_size: int) -> None:
        self._marks = marks
        self._selector = selector
        self._page_size = page_size

    def ends(self, key: str, pages: int, names: Iterable[Name]) -> list[tuple[str, int]]:
        """Where documents end that go, and how many pages go with each, of a node of `pages`
        whose last one is `key`."""
        mark = self._marks.get(key)
        node = None if mark is None else mark.node
        known: set[tuple[str, str, str]] = set()
        if node is not None:
            documents = [*(each.document for each in node.occurrences), *node.unmarked_documents]
            known = {document.name for document in documents}  # of which the tree has decided
        return [
            (key, -(-name.tokens // self._page_size) or pages)
            for name in names
            if self._selector.matches(name) and name[:3] not in known
        ]

    def keeps(self, page: str, names: Iterable[Name]) -> bool:
        """Whether a document ends with `page`, of files with these `names`, that stays."""
        mark = self._marks.get(page)
        if mark is not None and mark.node is not None:
            return True
        known = () if mark is None else mark.names
        return any(not self._selector.matches(name) for name in (*names, *known))
