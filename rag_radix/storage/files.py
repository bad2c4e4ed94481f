"""The files of one rank: read, written within a budget, discarded, by several threads at once."""

from __future__ import annotations

import errno
import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rag_radix.storage.index import PageIndex, Segment, StoredPath
from rag_radix.storage.segment import (
    SUFFIX,
    DamagedFileError,
    Header,
    Name,
    file_name,
    packed,
    page_digest,
    read_header,
    read_pages,
    remove_leftovers,
    segment_bytes,
    unpacked,
    write_segment,
)

logger = logging.getLogger(__name__)

# Between looks for files of other servers.
_RESCAN_S = 0.5
# Of the budget: made free beyond what is needed, so that not every write has to look for victims.
_EVICTED_AHEAD = 0.02
_RETRY_S = 30.0
_LONGEST_RETRY_S = 960.0


@dataclass(slots=True)
class FileCounters:
    """Since start.

    Attributes:
        written_files, written_pages, written_bytes: New ones.
        read_pages: Read and found right.
        evicted_files: Left to keep the budget.
        removed_pages: Gone by invalidation.
        damaged_files: Skipped.
        failed_writes: Batches of pages that couldn't be written.
    """

    written_files: int = 0
    written_pages: int = 0
    written_bytes: int = 0
    read_pages: int = 0
    evicted_files: int = 0
    removed_pages: int = 0
    damaged_files: int = 0
    failed_writes: int = 0


@dataclass(slots=True)
class Promise:
    """Pages that may be written.

    Attributes:
        parent: By page, the one before it.
        mark: Hash of the last page of their node.
        names: Documents of the node.
        namespace: Name of the one that it is in.
        tokens: Of all pages; none where files mustn't have them.
    """

    parent: dict[str, str | None]
    mark: str
    names: tuple[Name, ...]
    namespace: str
    tokens: array[int]

    def tokens_of(self, pages: Sequence[str]) -> array[int]:
        """Of consecutive pages."""
        per_page = len(self.tokens) // len(self.parent)
        first = list(self.parent).index(pages[0])
        return self.tokens[first * per_page : (first + len(pages)) * per_page]


@dataclass(slots=True)
class _Warned:
    """What has been said once, until it is well again."""

    problems: set[str] = field(default_factory=set)

    def warn(self, problem: str, message: str, *args: object) -> bool:
        """Whether it is said now."""
        if problem in self.problems:
            return False
        self.problems.add(problem)
        logger.warning(message, *args)
        return True

    def well(self, problem: str) -> None:
        self.problems.discard(problem)


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
        self._budget_bytes = budget_bytes
        self._priority = priority
        self._index = PageIndex()
        self._lock = threading.RLock()  # of `_index` and the promises
        self._writing = threading.Lock()  # taken before `_lock`
        self._promised: dict[str, Promise] = {}  # by page
        self._skipped: set[str] = set()
        self._scanned_s = 0.0
        self._scanned_mtime_ns = -1
        self._said = _Warned()
        self._retry_s = _RETRY_S
        self._retry_at_s: float | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory)
        except OSError as error:
            self._said.warn("directory", "Storage: %s can't be used: %s", directory, error)
        self._scan()

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, page: str) -> bool:
        return page in self._index

    @property
    def bytes(self) -> int:
        """What all files take."""
        return self._index.bytes

    # Looking

    def look(self) -> None:
        """Take account of all that others have written up to now."""
        with self._lock:
            self._scan()

    def count(self, hashes: Sequence[str]) -> int:
        """How many of `hashes`, consecutive pages, are there from the first on."""
        with self._lock:
            found = self._index.count(hashes)
            if found < len(hashes) and self._scan_is_due():
                self._scan()
                found = self._index.count(hashes)
            return found

    def _scan_is_due(self) -> bool:
        now = time.monotonic()
        if now - self._scanned_s < _RESCAN_S:
            return False
        self._scanned_s = now
        try:
            return self.directory.stat().st_mtime_ns != self._scanned_mtime_ns
        except OSError:
            return False

    def _scan(self) -> None:
        """Take account of files that others have written."""
        self._scanned_s = time.monotonic()
        try:
            self._scanned_mtime_ns = self.directory.stat().st_mtime_ns
            paths = sorted(self.directory.glob(f"*{SUFFIX}"))
        except OSError:
            return
        for path in paths:
            if not self._index.has_file(path.name) and path.name not in self._skipped:
                try:
                    header = read_header(path)
                    if header.identity != self._identity:
                        raise DamagedFileError("it belongs to another model or layout")
                    self._index.add(Segment(path, header, path.stat().st_size))
                except FileNotFoundError:
                    continue
                except (DamagedFileError, OSError, ValueError, TypeError, KeyError) as error:
                    self._skip(path, error)

    def _skip(self, path: Path, why: object) -> None:
        self._skipped.add(path.name)
        self.counters.damaged_files += 1
        logger.warning("Storage: %s is skipped: %s", path, why)

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
        """Read consecutive pages; returns how many are right from the first on. Files that are
        damaged are skipped from then on."""
        done = 0
        while done < len(hashes):
            with self._lock:
                segment = self._index.file_of(hashes[done])
            if segment is None:
                break
            first = segment.header.hashes.index(hashes[done])
            run = _common(segment.header.hashes[first:], hashes[done:])
            try:
                read_pages(segment.path, segment.header, first, pages[done : done + run])
            except FileNotFoundError:  # another server has removed it
                with self._lock:
                    self._index.remove(segment)
                break
            except (DamagedFileError, OSError) as error:
                with self._lock:
                    self._index.remove(segment)
                    self._skip(segment.path, error)
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
        chain = dict(zip(hashes, (parent, *hashes[:-1]), strict=True))
        promise = Promise(chain, hashes[-1], tuple(names), namespace, tokens or array("q"))
        with self._lock:
            self._promised.update(dict.fromkeys(hashes, promise))

    def write(self, hashes: Sequence[str], pages: Sequence[memoryview]) -> bool:
        """Write consecutive pages that were promised and aren't there yet.

        Returns: False when they couldn't be written, the first time: SGLang warns of each.
        """
        with self._writing:
            with self._lock:
                promises = [self._promised.pop(page, None) for page in hashes]
                there = self._index.count(hashes)
            promise = promises[-1]
            if promise is None or None in promises or there == len(hashes):
                return True
            rest = tuple(hashes[there:])
            parent = promise.parent[rest[0]]
            if parent is not None and parent not in self._index:
                self._gave_up(promise)  # nothing would reach it
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
        if not self._make_room(header):
            self._gave_up(promise)
            return True
        try:
            size = write_segment(path, header, pages)
        except OSError as error:
            self.counters.failed_writes += 1
            self._gave_up(promise)
            return not self._said.warn(
                "write",
                "Storage: nothing can be written to %s%s; what isn't there is computed again. %s",
                self.directory,
                ", which is full" if error.errno == errno.ENOSPC else "",
                error,
            )
        self._said.well("write")
        with self._lock:
            self._skipped.discard(path.name)
            self._index.add(Segment(path, header, size))
        self.counters.written_files += 1
        self.counters.written_pages += len(pages)
        self.counters.written_bytes += size
        return True

    def break_promises(self) -> None:
        """Nothing that was promised is written."""
        with self._writing, self._lock:
            self._promised.clear()

    def _gave_up(self, promise: Promise) -> None:
        """A part of a node isn't written: what follows in it is of no use."""
        with self._lock:
            for page in promise.parent:
                if self._promised.get(page) is promise:
                    del self._promised[page]
            if self._retry_at_s is None:
                self._retry_at_s = time.monotonic() + self._retry_s

    def is_to_try_again(self) -> bool:
        """Whether it is time to write again what was given up; longer each time until nothing
        is."""
        with self._lock:
            if self._retry_at_s is None:
                self._retry_s = _RETRY_S
                return False
            if time.monotonic() < self._retry_at_s:
                return False
            self._retry_at_s = None
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            return True

    # Leaving

    def _make_room(self, header: Header) -> bool:
        """Let the files of lowest priority leave, the last of a path first, until the budget has
        room; False when what would have to leave is worth more."""
        budget = self._budget_bytes
        if budget is None or self.bytes + (wanted := segment_bytes(header)) <= budget:
            return True
        priority = self._priority(header.mark)
        goal = budget - wanted - int(_EVICTED_AHEAD * budget)
        with self._lock:
            above = self._index.file_of(header.parent)
            for segment in self._index.victims(self._priority):
                has_room = self.bytes + wanted <= budget
                if self.bytes <= goal or (
                    segment is above or self._priority(segment.header.mark) > priority
                ):
                    return has_room
                self._remove(segment)
                self.counters.evicted_files += 1
            return self.bytes + wanted <= budget

    def _remove(self, segment: Segment) -> None:
        self._index.remove(segment)
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            self._skipped.add(segment.path.name)
            logger.error(
                "Storage: %s can't be removed (%s): remove it by hand, or it is read after the "
                "next start",
                segment.path,
                error,
            )

    def discard(self, hashes: Iterable[str]) -> int:
        """Let `hashes` and all pages below them be found no more, on disk neither; what was
        promised of them isn't written. Returns the pages that have gone."""
        with self._writing, self._lock:
            gone = self._index.below(hashes)
            cut: dict[str, tuple[Segment, set[str]]] = {}
            for page in gone:
                self._promised.pop(page, None)
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
        if kept:
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
                path = self.directory / file_name(shorter.hashes)
                size = write_segment(path, shorter, pages)
                self._remove(segment)
                self._index.add(Segment(path, shorter, size))
                return
            except (DamagedFileError, OSError) as error:
                logger.warning("Storage: %s is given up whole: %s", segment.path, error)
        self._remove(segment)

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
            promised = [page for page, p in self._promised.items() if p.namespace == namespace]
        return self.discard([*promised, *(segment.header.hashes[0] for segment in segments)])

    def clear(self) -> None:
        """Remove all files."""
        with self._writing, self._lock:
            self._promised.clear()
            for segment in self._index:
                self._remove(segment)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
