"""What the file of statistics says: of stored nodes, documents, paths, and the clocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from rag_radix.storage import histories
from rag_radix.storage.agreement import is_alike
from rag_radix.storage.marks import Mark, Marks
from rag_radix.storage.sidecar import FORMAT_VERSION

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.storage.files import SegmentFiles

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
        if (theirs := _of_others(others)) is not None:
            remembered = remembered or theirs.histories
            for mark in theirs.marks:
                if _has(files, mark.key):
                    mine = stored.setdefault(mark.key, mark.as_json())
                    mine["names"] = list(dict.fromkeys((*mine["names"], *mark.names)))
            for key, count in theirs.documents.items():
                counts[key] = max(counts.get(key, 0), count)
        return {
            **state,
            "marks": list(stored.values()),
            "documents": [(*key, count) for key, count in counts.items()],
            "histories": remembered,
        }

    return collect


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a file of statistics says."""

    marks: list[Mark]
    documents: dict[tuple[str, str, str], int]
    access_time: int
    device_clock: float
    host_clock: float
    histories: Any

    @classmethod
    def of_text(cls, text: bytes, owner: Marks) -> _Saved:
        """Raises KeyError, TypeError or ValueError where something else was written."""
        saved = orjson.loads(text)
        if saved["format"] != FORMAT_VERSION:
            raise ValueError(f"format {saved['format']}, not {FORMAT_VERSION}")
        return cls(
            marks=[Mark.of_json(fields, owner) for fields in saved["marks"]],
            documents={
                (str(id), str(version), str(namespace)): int(count)
                for id, version, namespace, count in saved["documents"]
            },
            access_time=int(saved["access_time"]),
            device_clock=float(saved["device_clock"]),
            host_clock=float(saved["host_clock"]),
            histories=saved.get("histories"),
        )


def _of_others(text: bytes) -> _Saved | None:
    """What another server has written; None where that is nothing, or of another version."""
    try:
        return _Saved.of_text(text, Marks()) if text else None
    except (KeyError, TypeError, ValueError):
        return None


def restore(tree: KnowledgeTree, marks: Marks, text: bytes) -> None:
    """Take over what an earlier server has saved, if all ranks have read the same."""
    if not is_alike(tree, text):
        logger.warning("Storage: ranks have read different statistics, which are ignored")
        return
    if not text:
        return
    try:
        saved = _Saved.of_text(text, marks)
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("Storage: the statistics can't be understood: %r", error)
        return
    for mark in saved.marks:
        marks.add(mark)
        marks.left(mark)
    tree.document_frequencies.restore(saved.documents)
    tree.tree_core.continue_from(saved.access_time)
    device, host = tree.component.device.clock, tree.component.host.clock
    device.evicted = max(device.evicted, saved.device_clock)
    host.evicted = max(host.evicted, saved.host_clock)
    _restore_histories(tree, saved.histories)


def _restore_histories(tree: KnowledgeTree, saved: Any) -> None:
    # A tree that has some of its own has been there before the backend.
    if saved is None or not tree.settings.policy.uses_history or len(tree.histories):
        return
    try:
        histories.restore(tree.histories, saved, tree.tree_core.access_time)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        logger.warning("Storage: the histories of paths can't be understood: %r", error)


def _has(files: SegmentFiles | None, page: str) -> bool:
    return files is None or page in files
