"""Documents on disk: JSON lines with an index of offsets and one of ids.

Opening maps four files and reads none of them, so it costs the same for ten documents as for
ten million. `ids.npy` holds a 64-bit hash of every id in ascending order and
`id_positions.npy` the position of the document each belongs to; equal hashes are told apart by
reading the documents.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from rag_radix_frontend.document import Document, format_document, parse_document
from rag_radix_frontend.errors import DamagedIndexError, SourceError

_LINES, _OFFSETS, _IDS, _ID_POSITIONS = FILES = (
    "documents.jsonl",
    "offsets.npy",
    "ids.npy",
    "id_positions.npy",
)


class DocumentStore:
    """Random access to the documents of a directory, by position and by id.

    Safe to share between threads. Closing (or leaving the `with` block) unmaps the files.

    Raises:
        DamagedIndexError: on opening, when the files don't belong together.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._offsets = _map(directory / _OFFSETS, np.int64)
        self._ids = _map(directory / _IDS, np.uint64)
        self._id_positions = _map(directory / _ID_POSITIONS, np.int64)
        path = directory / _LINES
        size_bytes = path.stat().st_size if path.is_file() else 0
        if not len(self._offsets) or size_bytes != self._offsets[-1] or not size_bytes:
            raise DamagedIndexError(f"{path} is missing or doesn't match its {_OFFSETS}")
        if not len(self) == len(self._ids) == len(self._id_positions):
            raise DamagedIndexError(
                f"{directory} has {len(self)} documents but {len(self._ids)} ids; build it again"
            )
        with path.open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, position: int) -> Document:
        """The document at a position.

        Raises:
            IndexError: there is no such position.
            DamagedIndexError: the line there isn't a document.
        """
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside the {len(self)} documents")
        line = self._lines[self._offsets[position] : self._offsets[position + 1]]
        try:
            return parse_document(line)
        except SourceError as error:
            raise DamagedIndexError(
                f"{self.directory / _LINES}, document {position}: {error}"
            ) from None

    def __iter__(self) -> Iterator[Document]:
        return (self[position] for position in range(len(self)))

    def by_id(self, id: str) -> Document:
        """The document of an id.

        Raises:
            KeyError: no document has this id.
        """
        id_hash = _hash(id)
        rank = int(np.searchsorted(self._ids, np.uint64(id_hash)))
        while rank < len(self) and self._ids[rank] == id_hash:
            document = self[int(self._id_positions[rank])]
            if document.id == id:
                return document
            rank += 1
        raise KeyError(id)

    def close(self) -> None:
        """Unmap the documents; the store can't be used any more."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def write_store(source: Path, directory: Path, *, progress: bool = False) -> int:
    """Check a JSON-lines source and write it as a store; returns the number of documents.

    Blank lines are skipped. Memory grows with the ids, not with the texts.

    Raises:
        SourceError: names the line that isn't a document or repeats an id.
    """
    line_of_id: dict[str, int] = {}
    offsets = [0]
    bar = tqdm(
        desc="Reading documents",
        total=source.stat().st_size,
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar, source.open("rb") as lines, (directory / _LINES).open("wb") as out:
        for number, line in enumerate(lines, start=1):
            bar.update(len(line))
            if not line.strip():
                continue
            try:
                document = parse_document(line)
            except SourceError as error:
                raise SourceError(f"{source}, line {number}: {error}") from None
            first = line_of_id.setdefault(document.id, number)
            if first != number:
                raise SourceError(
                    f"{source}, line {number}: id {document.id!r} is already on line {first}"
                )
            offsets.append(offsets[-1] + out.write(format_document(document)))
    if not line_of_id:
        raise SourceError(f"{source} has no documents")
    # Insertion order is document order: duplicates were refused.
    ids = np.fromiter((_hash(id) for id in line_of_id), dtype=np.uint64, count=len(line_of_id))
    order = np.argsort(ids, kind="stable")
    np.save(directory / _OFFSETS, np.asarray(offsets, dtype=np.int64))
    np.save(directory / _IDS, ids[order])
    np.save(directory / _ID_POSITIONS, order.astype(np.int64))
    return len(line_of_id)


def _map(path: Path, dtype: type[np.generic]) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DamagedIndexError(f"{path} is missing or not a number file: {error}") from None
    if array.ndim != 1 or array.dtype != dtype:
        raise DamagedIndexError(f"{path} holds {array.dtype} values of shape {array.shape}")
    return array


def _hash(id: str) -> int:
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "little")
