"""The files of one rank: read, written within a budget, discarded, by several threads at once."""

from __future__ import annotations

import errno
import logging
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rag_radix.storage.budget import Budget
from rag_radix.storage.directory import Directory, FileCounters
from rag_radix.storage.index import Segment, StoredPath
from rag_radix.storage.promises import Promise, Promises
from rag_radix.storage.segment import (
    DamagedFileError,
    Header,
    Name,
    file_name,
    packed,
    page_digest,
    read_pages,
    right_pages,
    unpacked,
    write_segment,
)

logger = logging.getLogger(__name__)


class SegmentFiles:
    """Pages in files of a directory, found by their hashes.

    A page is only of use behind all pages before it, so what leaves takes along what is below it.
    Threads of SGLang read and write while the scheduler promises and discards; several servers
    may use the directory at once.

    Args:
        directory: Made if there is none.
        identity: What the KV belongs to; files of another one are skipped.
        budget_bytes: What the files may take; None for as much as there is.
        priority: What a mark is worth; the lowest leaves first.
    """

    def __init__(
        self,
        directory: Path,
        identity: str,
        budget_bytes: int | None,
        priority: Callable[[str], float],
    ) -> None:
        self.directory = directory
        self.counters = FileCounters()
        self._identity = identity
        self._lock = threading.RLock()  # of the three that follow
        self._there = Directory(directory, identity, self.counters)
        self._budget = Budget(self._there, budget_bytes, priority, self.counters)
        self._promises = Promises()
        self._index = self._there.index
        self._writing = threading.Lock()  # taken before `_lock`
        self._has_warned = False  # that nothing can be written, since it could

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, page: str) -> bool:
        return page in self._index

    @property
    def bytes(self) -> int:
        """What all files take."""
        return self._index.bytes

    # Looking

    def look(self) -> bool:
        """Before something goes: take account of all that others have written up to now. Whether
        the directory could be read."""
        with self._lock:
            return self._there.scan_to_remove()

    def count(self, hashes: Sequence[str]) -> int:
        """How many of `hashes`, consecutive pages, are there from the first on."""
        with self._lock:
            found = self._index.count(hashes)
            if found < len(hashes) and self._there.scan_if_due():
                found = self._index.count(hashes)
            return found

    def documents(self) -> list[str]:
        """The ids of all documents that files name."""
        with self._lock:
            return self._index.documents()

    def named(self, id: str) -> list[tuple[str, int, tuple[Name, ...]]]:
        """See `PageIndex.named`."""
        with self._lock:
            return self._index.named(id)

    def names_at(self, mark: str) -> tuple[Name, ...]:
        """See `PageIndex.names_at`."""
        with self._lock:
            return self._index.names_at(mark)

    def names_along(self, hashes: Iterable[str]) -> dict[str, tuple[Name, ...]]:
        """See `PageIndex.names_along`."""
        with self._lock:
            return self._index.names_along(hashes)

    def marks(self) -> list[str]:
        """See `PageIndex.marks`."""
        with self._lock:
            return self._index.marks()

    def path_to(self, page: str) -> StoredPath | None:
        """See `PageIndex.path_to`."""
        with self._lock:
            return self._index.path_to(page)

    # Reading

    def read(self, hashes: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Read consecutive pages; returns how many are right from the first on. A file that is
        damaged goes; one that can't be read is left alone for a while."""
        done = 0
        while done < len(hashes):
            with self._lock:
                segment = self._index.file_of(hashes[done])
            if segment is None:
                break
            first = segment.header.hashes.index(hashes[done])
            run = _common(segment.header.hashes[first:], hashes[done:])
            wanted = pages[done : done + run]
            try:
                read_pages(segment.path, segment.header, first, wanted)
            except FileNotFoundError:  # another server has removed it
                with self._lock:
                    self._index.remove(segment)
                break
            except OSError as error:
                with self._lock:
                    self._there.unreadable(segment, error)
                done += right_pages(segment.header, first, wanted)
                break
            except DamagedFileError as error:
                done += right_pages(segment.header, first, wanted)
                with self._lock:
                    if self._there.is_another(segment, error):
                        continue
                break
            done += run
        self.counters.read_pages += done
        return done

    # Writing

    def promise(
        self,
        parent: str | None,
        hashes: Sequence[str],
        names: Sequence[Name],
        namespace: str = "",
        tokens: array[int] | None = None,
    ) -> None:
        """Let the pages of a node be written, until they are or are discarded."""
        with self._lock:
            self._promises.make(parent, hashes, names, namespace, tokens)

    def write(self, hashes: Sequence[str], pages: Sequence[memoryview]) -> bool:
        """Write consecutive pages that were promised and aren't there yet.

        Returns: False when they couldn't be written, the first time: SGLang warns of each.
        """
        is_written = True
        with self._writing:
            with self._lock:
                self._budget.keep()
                taken = self._promises.take(hashes)
            for promise, run in taken:
                part = slice(run.start, run.stop)
                is_written &= self._write_promised(promise, tuple(hashes[part]), pages[part])
        return is_written

    def _write_promised(
        self, promise: Promise, hashes: tuple[str, ...], pages: Sequence[memoryview]
    ) -> bool:
        with self._lock:
            there = self._index.count(hashes)
        if there == len(hashes):
            return True
        rest = hashes[there:]
        parent = promise.parent[rest[0]]
        if parent is not None and parent not in self._index:
            self._give_up(promise)  # nothing would reach it
            return True
        header = Header(
            identity=self._identity,
            parent=parent,
            hashes=rest,
            digests=(),
            page_bytes=len(pages[0]),
            mark=promise.mark,
            mark_pages=len(promise.parent),
            names=promise.names,
            namespace=promise.namespace,
            tokens=packed(promise.tokens_of(rest)),
        )
        return self._write(promise, header, pages[there:])

    def _write(self, promise: Promise, header: Header, pages: Sequence[memoryview]) -> bool:
        header = replace(header, digests=tuple(map(page_digest, pages)))
        path = self.directory / file_name(header.hashes)
        with self._lock:
            has_room = self._budget.make_room(header)
        if not has_room:
            self._give_up(promise)
            return True
        try:
            status = write_segment(path, header, pages)
        except OSError as error:
            self.counters.failed_writes += 1
            self._give_up(promise)
            if self._has_warned:
                return True
            self._has_warned = True
            logger.warning(
                "Storage: nothing can be written to %s%s; what isn't there is computed again. %s",
                self.directory,
                ", which is full" if error.errno == errno.ENOSPC else "",
                error,
            )
            return False
        self._has_warned = False
        with self._lock:
            self._there.add(Segment(path, header, status.st_size, status.st_ino))
        self.counters.written_files += 1
        self.counters.written_pages += len(pages)
        self.counters.written_bytes += status.st_size
        return True

    def break_promises(self) -> None:
        """Nothing that was promised is written."""
        with self._writing, self._lock:
            self._promises.clear()

    def _give_up(self, promise: Promise) -> None:
        with self._lock:
            self._promises.give_up(promise)

    def is_to_try_again(self) -> bool:
        """See `Promises.is_to_try_again`; there is a directory then, if it can be. What couldn't be
        removed is tried again, too."""
        with self._lock:
            self._there.try_to_remove()
            is_due = self._promises.is_to_try_again()
            if is_due:
                self._there.make_anew()
            return is_due

    # Leaving

    @property
    def gone_files(self) -> int:
        """Files that had to go and went, since start."""
        return self._there.gone_files

    @property
    def left_files(self) -> int:
        """See `Directory.left_files`."""
        with self._lock:
            return self._there.left_files

    def try_to_remove(self) -> None:
        """Try once more to remove what couldn't be removed."""
        with self._lock:
            self._there.try_to_remove(now=True)

    def keep_budget(self) -> None:
        """See `Budget.keep`."""
        with self._lock:
            self._budget.keep()

    def discard(self, hashes: Iterable[str]) -> int:
        """Let `hashes` and all pages below them be found no more, on disk neither; what was
        promised of them isn't written. Returns the pages that have gone."""
        with self._writing, self._lock:
            gone = self._index.below(hashes)
            cut: dict[str, tuple[Segment, set[str]]] = {}
            for page in gone:
                self._promises.discard(page)
                for segment in self._index.files_of(page):
                    cut.setdefault(segment.path.name, (segment, set()))[1].add(page)
            removed = 0
            for segment, pages in cut.values():
                removed += len(pages)
                self._cut(segment, pages)
            self.counters.removed_pages += removed
            return removed

    def _cut(self, segment: Segment, gone: set[str]) -> None:
        """Remove the file; what of it stays, its beginning, becomes another."""
        header = segment.header
        kept = next(i for i, page in enumerate(header.hashes) if page in gone)
        path = self.directory / file_name(header.hashes[:kept]) if kept else None
        # Another server's with the same pages has documents of its own.
        if path is not None and self._index.file_called(path.name) is None:
            pages = [memoryview(bytearray(header.page_bytes)) for _ in range(kept)]
            try:
                read_pages(segment.path, header, 0, pages)
                tokens = unpacked(header.tokens)
                shorter = replace(
                    header,
                    hashes=header.hashes[:kept],
                    digests=header.digests[:kept],
                    names=(),
                    tokens=packed(tokens[: len(tokens) // len(header.hashes) * kept]),
                )
                status = write_segment(path, shorter, pages)
                self._there.remove(segment, must_go=True)
                self._there.add(Segment(path, shorter, status.st_size, status.st_ino))
                return
            except (DamagedFileError, OSError) as error:
                logger.warning("Storage: %s is given up whole: %s", segment.path, error)
        self._there.remove(segment, must_go=True)

    def discard_documents(
        self, ends: Iterable[tuple[str, int]], is_kept: Callable[[str], bool]
    ) -> int:
        """Discard documents; see `PageIndex.of_documents`."""
        with self._lock:
            gone = self._index.of_documents(list(ends), is_kept)
        return self.discard(gone)

    def discard_namespace(self, namespace: str) -> int:
        """Discard all that is in a namespace."""
        with self._lock:
            segments = [s for s in self._index if s.header.namespace == namespace]
            promised = self._promises.pages_in(namespace)
        return self.discard([*promised, *(segment.header.hashes[0] for segment in segments)])

    def clear(self) -> None:
        """Remove all files, also those that couldn't be read."""
        with self._writing, self._lock:
            self._promises.clear()
            self._there.clear()


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
