"""The files of one rank: which pages they hold, what hangs below what, what leaves first."""

from __future__ import annotations

import errno
import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from rag_radix.storage.segment import (
    SUFFIX,
    DamagedFileError,
    Header,
    Name,
    file_name,
    page_digest,
    read_header,
    read_pages,
    remove_leftovers,
    segment_bytes,
    write_segment,
)

logger = logging.getLogger(__name__)

# Between looks for files of other servers.
_RESCAN_S = 0.5
# Of the budget: made free beyond what is needed, so that not every write has to look for victims.
_EVICTED_AHEAD = 0.02
_LEFTOVER_S = 3600.0
_RETRY_S = 30.0
_LONGEST_RETRY_S = 960.0
_K = TypeVar("_K")


@dataclass(slots=True, eq=False)
class Segment:
    """A file that is there."""

    path: Path
    header: Header
    bytes: int


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
    """

    parent: dict[str, str | None]
    mark: str
    names: tuple[Name, ...]
    namespace: str


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
        self.bytes = 0
        self._identity = identity
        self._budget_bytes = budget_bytes
        self._priority = priority
        self._index = threading.RLock()
        self._writing = threading.Lock()  # taken before `_index`
        self._segments: dict[str, Segment] = {}  # by file name
        self._pages: dict[str, Segment] = {}
        self._below: dict[str | None, list[Segment]] = {}
        self._marked: dict[str, list[Segment]] = {}  # by mark
        self._named: dict[str, set[str]] = {}  # marks by document, some of them gone
        self._promised: dict[str, Promise] = {}  # by page
        self._skipped: set[str] = set()
        self._scanned_s = 0.0
        self._scanned_mtime_ns = -1
        self._said = _Warned()
        self._retry_s = _RETRY_S
        self._retry_at_s: float | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory, time.time() - _LEFTOVER_S)
        except OSError as error:
            self._said.warn("directory", "Storage: %s can't be used: %s", directory, error)
        self._scan()

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, page: str) -> bool:
        return page in self._pages

    # Looking

    def count(self, hashes: Sequence[str]) -> int:
        """How many of `hashes`, consecutive pages, are there from the first on."""
        with self._index:
            found = self._count(hashes)
            if found < len(hashes) and self._scan_is_due():
                self._scan()
                found = self._count(hashes)
            return found

    def _count(self, hashes: Sequence[str]) -> int:
        return next((i for i, page in enumerate(hashes) if page not in self._pages), len(hashes))

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
            if path.name not in self._segments and path.name not in self._skipped:
                try:
                    header = read_header(path)
                    if header.identity != self._identity:
                        raise DamagedFileError("it belongs to another model or layout")
                    self._add(Segment(path, header, path.stat().st_size))
                except FileNotFoundError:
                    continue
                except (DamagedFileError, OSError, ValueError, TypeError, KeyError) as error:
                    self._skip(path, error)

    def _skip(self, path: Path, why: object) -> None:
        self._skipped.add(path.name)
        self.counters.damaged_files += 1
        logger.warning("Storage: %s is skipped: %s", path, why)

    def _add(self, segment: Segment) -> None:
        self._segments[segment.path.name] = segment
        for page in segment.header.hashes:
            self._pages[page] = segment
        self._below.setdefault(segment.header.parent, []).append(segment)
        self._marked.setdefault(segment.header.mark, []).append(segment)
        for name in segment.header.names:
            self._named.setdefault(name.id, set()).add(segment.header.mark)
        self.bytes += segment.bytes

    def _forget(self, segment: Segment) -> None:
        if self._segments.pop(segment.path.name, None) is None:
            return
        for page in segment.header.hashes:
            if self._pages.get(page) is segment:
                del self._pages[page]
        _drop(self._below, segment.header.parent, segment)
        _drop(self._marked, segment.header.mark, segment)
        self.bytes -= segment.bytes

    def documents(self) -> list[str]:
        """The ids of all documents that files name."""
        with self._index:
            return list(self._named)

    def named(self, id: str) -> list[tuple[str, int, tuple[Name, ...]]]:
        """Nodes of which files say that the document is there: the last page of each, how many
        pages it has, and all its documents."""
        with self._index:
            found = []
            for mark in sorted(self._named.get(id, ())):
                if mark in self._marked:
                    header = self._marked[mark][0].header
                    found.append((mark, header.mark_pages, self.names_at(mark)))
                else:
                    self._named[id].discard(mark)
            return found

    def names_at(self, mark: str) -> tuple[Name, ...]:
        """The documents of a node, by its last page."""
        with self._index:
            names = [name for each in self._marked.get(mark, ()) for name in each.header.names]
        return tuple(dict.fromkeys(names))

    # Reading

    def read(self, hashes: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Read consecutive pages; returns how many are right from the first on. Files that are
        damaged are skipped from then on."""
        done = 0
        while done < len(hashes):
            with self._index:
                segment = self._pages.get(hashes[done])
            if segment is None:
                break
            first = segment.header.hashes.index(hashes[done])
            run = _common(segment.header.hashes[first:], hashes[done:])
            try:
                read_pages(segment.path, segment.header, first, pages[done : done + run])
            except FileNotFoundError:  # another server has removed it
                with self._index:
                    self._forget(segment)
                break
            except (DamagedFileError, OSError) as error:
                with self._index:
                    self._forget(segment)
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
    ) -> None:
        """Let the pages of a node be written, until they are or are discarded."""
        chain = dict(zip(hashes, (parent, *hashes[:-1]), strict=True))
        promise = Promise(chain, hashes[-1], tuple(names), namespace)
        with self._index:
            self._promised.update(dict.fromkeys(hashes, promise))

    def write(self, hashes: Sequence[str], pages: Sequence[memoryview]) -> bool:
        """Write consecutive pages that were promised and aren't there yet.

        Returns: False when they couldn't be written, the first time: SGLang warns of each.
        """
        with self._writing:
            with self._index:
                promises = [self._promised.pop(page, None) for page in hashes]
                there = self._count(hashes)
            promise = promises[-1]
            if promise is None or None in promises or there == len(hashes):
                return True
            rest = tuple(hashes[there:])
            parent = promise.parent[rest[0]]
            if parent is not None and parent not in self._pages:
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
        with self._index:
            self._skipped.discard(path.name)
            self._add(Segment(path, header, size))
        self.counters.written_files += 1
        self.counters.written_pages += len(pages)
        self.counters.written_bytes += size
        return True

    def break_promises(self) -> None:
        """Nothing that was promised is written."""
        with self._writing, self._index:
            self._promised.clear()

    def _gave_up(self, promise: Promise) -> None:
        """A part of a node isn't written: what follows in it is of no use."""
        with self._index:
            for page in promise.parent:
                if self._promised.get(page) is promise:
                    del self._promised[page]
            if self._retry_at_s is None:
                self._retry_at_s = time.monotonic() + self._retry_s

    def is_to_try_again(self) -> bool:
        """Whether it is time to write again what was given up; longer each time until nothing
        is."""
        with self._index:
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
        with self._index:
            above = self._pages.get(header.parent or "")
            for segment in self._victims():
                has_room = self.bytes + wanted <= budget
                if self.bytes <= goal or (
                    segment is above or self._priority(segment.header.mark) > priority
                ):
                    return has_room
                self._remove(segment)
                self.counters.evicted_files += 1
            return self.bytes + wanted <= budget

    def _victims(self) -> Iterator[Segment]:
        """Files with nothing below them, lowest priority first; ties by name."""

        def entry(segment: Segment) -> tuple[float, str]:
            return self._priority(segment.header.mark), segment.path.name

        heap = [entry(s) for s in self._segments.values() if not self._has_below(s)]
        heapq.heapify(heap)
        while heap:
            segment = self._segments.get(heapq.heappop(heap)[1])
            if segment is None:
                continue
            above = self._pages.get(segment.header.parent or "")
            yield segment
            gone = segment.path.name not in self._segments
            if gone and above is not None and not self._has_below(above):
                heapq.heappush(heap, entry(above))

    def _has_below(self, segment: Segment) -> bool:
        return any(page in self._below for page in segment.header.hashes)

    def _remove(self, segment: Segment) -> None:
        self._forget(segment)
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
        with self._writing, self._index:
            if self._scan_is_due():
                self._scan()
            gone: dict[str, None] = {}
            stack = list(hashes)
            while stack:
                page = stack.pop()
                if page in gone:
                    continue
                gone[page] = None
                self._promised.pop(page, None)
                stack += self._next(page)
            cut: dict[str, list[str]] = {}
            for page in gone:
                segment = self._pages.get(page)
                if segment is not None:
                    cut.setdefault(segment.path.name, []).append(page)
            removed = 0
            for name, pages in cut.items():
                removed += len(pages)
                self._cut(self._segments[name], set(pages))
            self.counters.removed_pages += removed
            return removed

    def _next(self, page: str) -> list[str]:
        """The pages that follow on `page`."""
        following = [segment.header.hashes[0] for segment in self._below.get(page, ())]
        segment = self._pages.get(page)
        if segment is not None:
            index = segment.header.hashes.index(page) + 1
            following += segment.header.hashes[index : index + 1]
        return following

    def _before(self, page: str) -> str | None:
        segment = self._pages.get(page)
        if segment is None:
            return None
        index = segment.header.hashes.index(page)
        return segment.header.hashes[index - 1] if index else segment.header.parent

    def _cut(self, segment: Segment, gone: set[str]) -> None:
        """Remove the file; what of it stays, its beginning, becomes another."""
        header = segment.header
        kept = next(i for i, page in enumerate(header.hashes) if page in gone)
        if kept:
            pages = [memoryview(bytearray(header.page_bytes)) for _ in range(kept)]
            try:
                read_pages(segment.path, header, 0, pages)
                shorter = replace(
                    header, hashes=header.hashes[:kept], digests=header.digests[:kept], names=()
                )
                path = self.directory / file_name(shorter.hashes)
                size = write_segment(path, shorter, pages)
                self._remove(segment)
                self._add(Segment(path, shorter, size))
                return
            except (DamagedFileError, OSError) as error:
                logger.warning("Storage: %s is given up whole: %s", segment.path, error)
        self._remove(segment)

    def discard_documents(
        self, ends: Iterable[tuple[str, int]], is_kept: Callable[[str], bool]
    ) -> int:
        """Discard documents with what hangs below them, and of the pages before their last those
        that belong to nothing else.

        Args:
            ends: The last page of each, and its number of pages.
            is_kept: Whether a document that stays ends with a page.
        """
        ends = list(ends)
        gone: set[str] = set()
        with self._index:
            stack = [page for page, _ in ends]
            for page in set(stack).difference(self._pages):
                # Its end has left to keep the budget: all that is left of the node goes.
                for segment in self._marked.get(page, ()):
                    stack += segment.header.hashes
            while stack:
                page = stack.pop()
                if page not in gone:
                    gone.add(page)
                    stack += self._next(page)
            for end, pages in ends:
                above = self._before(end)
                for _ in range(pages - 1):
                    if above is None or is_kept(above) or not gone.issuperset(self._next(above)):
                        break
                    gone.add(above)
                    above = self._before(above)
        return self.discard(gone)

    def discard_namespace(self, namespace: str) -> int:
        """Discard all that is in a namespace."""
        with self._index:
            segments = [s for s in self._segments.values() if s.header.namespace == namespace]
            promised = [page for page, p in self._promised.items() if p.namespace == namespace]
        return self.discard([*promised, *(segment.header.hashes[0] for segment in segments)])

    def clear(self) -> None:
        """Remove all files."""
        with self._writing, self._index:
            self._promised.clear()
            for segment in list(self._segments.values()):
                self._remove(segment)


def _drop(index: dict[_K, list[Segment]], key: _K, segment: Segment) -> None:
    index[key].remove(segment)
    if not index[key]:
        del index[key]


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
