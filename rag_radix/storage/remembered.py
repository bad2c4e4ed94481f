"""What the file of statistics says: of stored nodes, documents, paths, and the clocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from rag_radix.storage import histories
from rag_radix.storage.agreement import is_alike
from rag_radix.storage.marks import Mark
from rag_radix.storage.sidecar import FORMAT_VERSION

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.storage.files import SegmentFiles
    from rag_radix.storage.marks import Marks

logger = logging.getLogger(__name__)


def snapshot(
    tree: KnowledgeTree, marks: Marks, files: SegmentFiles | None
) -> Callable[[bytes], dict[str, Any]]:
    """What there is to save now, in a form that another thread can finish."""
    known = list(marks)
    documents = tree.document_frequencies.counts()
    paths = histories.saved(tree.histories) if tree.settings.policy.uses_history else None
    state = {
        "format": FORMAT_VERSION,
        "access_time": tree.tree_core.access_time,
        "device_clock": tree.component.device.clock.evicted,
        "host_clock": tree.component.host.clock.evicted,
    }

    def collect(others: bytes) -> dict[str, Any]:
        stored = {mark.key: mark.as_json() for mark in known if _has(files, mark.key)}
        counts = dict(documents())
        remembered = None if paths is None else paths()
        if others:
            theirs = orjson.loads(others)
            remembered = remembered or theirs.get("histories")
            for fields in theirs["marks"]:
                if _has(files, fields["key"]):
                    mine = stored.setdefault(fields["key"], fields)
                    names = map(tuple, (*mine["names"], *fields["names"]))
                    mine["names"] = list(dict.fromkeys(names))
            for id, version, namespace, count in theirs["documents"]:
                key = id, version, namespace
                counts[key] = max(counts.get(key, 0), count)
        return {
            **state,
            "marks": list(stored.values()),
            "documents": [(*key, count) for key, count in counts.items()],
            "histories": remembered,
        }

    return collect


def restore(tree: KnowledgeTree, marks: Marks, text: bytes) -> None:
    """Take over what an earlier server has saved, if all ranks have read the same."""
    if not is_alike(tree, text):
        logger.warning("Storage: ranks have read different statistics, which are ignored")
        return
    if not text:
        return
    try:
        saved = orjson.loads(text)
        if saved["format"] != FORMAT_VERSION:
            raise ValueError(f"format {saved['format']}, not {FORMAT_VERSION}")
        found = [Mark.of_json(fields, marks) for fields in saved["marks"]]
        documents = {
            (str(id), str(version), str(namespace)): int(count)
            for id, version, namespace, count in saved["documents"]
        }
        clocks = float(saved["device_clock"]), float(saved["host_clock"])
        access_time = int(saved["access_time"])
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("Storage: the statistics can't be understood: %r", error)
        return
    for mark in found:
        marks.add(mark)
        marks.left(mark)
    tree.document_frequencies.restore(documents)
    tree.tree_core.continue_from(access_time)
    component = tree.component
    for tier, evicted in zip((component.device, component.host), clocks, strict=True):
        tier.clock.evicted = max(tier.clock.evicted, evicted)
    _restore_histories(tree, saved.get("histories"))


def _restore_histories(tree: KnowledgeTree, saved: dict[str, Any] | None) -> None:
    # A tree that has some of its own has been there before the backend.
    if saved is None or not tree.settings.policy.uses_history or len(tree.histories):
        return
    try:
        histories.restore(tree.histories, saved, tree.tree_core.access_time)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        logger.warning("Storage: the histories of paths can't be understood: %r", error)


def _has(files: SegmentFiles | None, page: str) -> bool:
    return files is None or page in files
