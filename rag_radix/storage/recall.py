"""What comes back from storage is what it was when it left."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rag_radix.node import Occurrence
from rag_radix.retrieval import Retrieval
from rag_radix.statistics import DocumentKey, namespace_name

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode
    from rag_radix.storage.marks import Mark, Marks
    from rag_radix.storage.segment import Name
    from rag_radix.tree_core import KnowledgeTreeCore


def recall(
    tree: KnowledgeTree,
    marks: Marks,
    node: DocumentNode,
    req: Any,
    names: Mapping[str, tuple[Name, ...]] | None,
) -> None:
    """`node` has come from storage: cut it where nodes were, name it and give it the
    statistics that it had.

    Args:
        req: The request that it was read for; None where that has ended, or there is none.
        names: What its files say, see `PageIndex.names_along`; None where that isn't the same on
            all ranks, so that any document may be there.
    """
    core = tree.tree_core
    for page, documents in (names or {}).items():
        marks.also_named(page, documents)
    there = core.path_to(node.id)[:-1]
    done = 0
    for end in [i for i, page in enumerate(node.hash_value[:-1], 1) if marks.get(page)]:
        tree._split(node, (end - done) * core.page_size)
        done = end
    if req is not None:
        retrieval = Retrieval.of(req, tree.settings.max_depth)
        tree._cut_and_name(retrieval, core.path_to(node.id), req)
    path = core.path_to(node.id)
    for piece in path:
        if piece not in there:
            is_known = bool(names) and marks.get(piece.hash_value[-1]) is not None
            if names is None or (req is None and not is_known):
                core.forget_names(piece)
            _recall(tree, marks, piece)
    for above, below in zip(path[-2::-1], path[:0:-1], strict=True):
        above.statistics.frequency = max(above.statistics.frequency, below.statistics.frequency)
    for each in path:
        core.rank(each)


def _recall(tree: KnowledgeTree, marks: Marks, node: DocumentNode) -> None:
    key = node.hash_value[-1]
    mark = marks.get(key)
    if mark is not None and mark.node is None:
        old, statistics = mark.statistics, node.statistics
        statistics.frequency = old.frequency
        statistics.document_frequency = old.document_frequency
        statistics.cost_per_token_s = old.cost_per_token_s
        statistics.cost_samples = old.cost_samples
        if mark.path is not None:
            statistics.history = tree.histories.get(mark.path)
        if mark.names_forgotten:
            tree.tree_core.forget_names(node)
        _rename(tree.tree_core, node, mark)
    node.mark = marks.attach(node, key)


def _rename(core: KnowledgeTreeCore, node: DocumentNode, mark: Mark) -> None:
    key = node.key
    # A document that several tenants may share has no salt, although its place has one.
    salts = {namespace_name(key.extra_key, salt): salt for salt in (None, key.cache_salt)}
    path = core.path_to(node.id)
    lengths = set(accumulate(above.statistics.tokens for above in reversed(path)))
    for name in mark.names:
        if name.namespace not in salts:
            core.forget_names(node)
            continue
        salt = salts[name.namespace]
        document = DocumentKey(name.id, name.version, key.extra_key, salt)
        if name.tokens in lengths:
            core.name(node, Occurrence(document, name.tokens))
        else:
            core.note_unmarked(node, document)
