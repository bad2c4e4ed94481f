"""Which pages files hold: what hangs below what, which documents are where, what leaves first."""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from rag_radix.storage.segment import Header, Name, unpacked

_K = TypeVar("_K")


@dataclass(slots=True, eq=False)
class Segment:
    """A file that is there.

    Attributes:
        inode: Of the file with this header; whoever writes it anew makes another one.
        readable_s: From when on it may be read again, as `time.monotonic` counts.
    """

    path: Path
    header: Header
    bytes: int
    inode: int
    readable_s: float = 0.0


class StoredPath(NamedTuple):
    """A prompt's beginning, as files have it.

    Attributes:
        tokens: Of whole pages.
        names: Documents of its nodes, by the last page of each.
    """

    tokens: array[int]
    names: dict[str, tuple[Name, ...]]

    def as_bytes(self) -> bytes:
        """The same for the same path, however it is cut into files."""
        return self.tokens.tobytes() + repr(sorted(self.names.items())).encode()


class PageIndex:
    """Files by the hashes of their pages, each of which depends on all pages before it.

    Attributes:
        bytes: Of all files.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._segments: dict[str, Segment] = {}  # by file name
        self._pages: dict[str, Segment] = {}
        self._copies: dict[str, list[Segment]] = {}  # of pages that other files have as well
        self._below: dict[str | None, list[Segment]] = {}
        self._marked: dict[str, list[Segment]] = {}  # by mark
        self._named: dict[str, set[str]] = {}  # marks by document

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, page: str | None) -> bool:
        return page in self._pages

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    def file_called(self, name: str) -> Segment | None:
        return self._segments.get(name)

    def file_of(self, page: str | None) -> Segment | None:
        return None if page is None else self._pages.get(page)

    def files_of(self, page: str) -> list[Segment]:
        """All that have it: servers that share a directory may have written it at once."""
        segment = self._pages.get(page)
        return [] if segment is None else [segment, *self._copies.get(page, ())]

    def count(self, hashes: Sequence[str]) -> int:
        """How many of `hashes`, consecutive pages, are there and readable from the first on."""
        now_s = time.monotonic()
        for number, page in enumerate(hashes):
            segment = self._pages.get(page)
            if segment is None or segment.readable_s > now_s:
                return number
        return len(hashes)

    def add(self, segment: Segment) -> None:
        if (former := self._segments.get(segment.path.name)) is not None:
            self.remove(former)  # the same pages, written anew
        self._segments[segment.path.name] = segment
        for page in segment.header.hashes:
            if (other := self._pages.get(page)) is not None:
                self._copies.setdefault(page, []).append(other)
            self._pages[page] = segment
        self._below.setdefault(segment.header.parent, []).append(segment)
        self._marked.setdefault(segment.header.mark, []).append(segment)
        for name in segment.header.names:
            self._named.setdefault(name.id, set()).add(segment.header.mark)
        self.bytes += segment.bytes

    def remove(self, segment: Segment) -> None:
        """Forget a file, unless it has been replaced under its name."""
        if self._segments.get(segment.path.name) is not segment:
            return
        del self._segments[segment.path.name]
        for page in segment.header.hashes:
            copies = self._copies.get(page, [])
            if self._pages[page] is not segment:
                copies.remove(segment)
            elif copies:
                self._pages[page] = copies.pop()
            else:
                del self._pages[page]
            if not copies:
                self._copies.pop(page, None)
        _drop(self._below, segment.header.parent, segment)
        _drop(self._marked, mark := segment.header.mark, segment)
        left = {name.id for name in self.names_at(mark)}
        for id in {name.id for name in segment.header.names} - left:
            self._named[id].discard(mark)
            if not self._named[id]:
                del self._named[id]
        self.bytes -= segment.bytes

    # Documents

    def documents(self) -> list[str]:
        """The ids of all documents that files name."""
        return list(self._named)

    def named(self, id: str) -> list[tuple[str, int, tuple[Name, ...]]]:
        """Nodes of which files say that the document is there: the last page of each, how many
        pages it has, and all its documents."""
        return [
            (mark, self._marked[mark][0].header.mark_pages, self.names_at(mark))
            for mark in sorted(self._named.get(id, ()))
        ]

    def names_at(self, mark: str) -> tuple[Name, ...]:
        """The documents of a node, by its last page."""
        names = [name for each in self._marked.get(mark, ()) for name in each.header.names]
        return tuple(dict.fromkeys(names))

    def names_along(self, hashes: Iterable[str]) -> dict[str, tuple[Name, ...]]:
        """The documents of the nodes that end with one of `hashes`, by the last page of each."""
        return {page: tuple(sorted(self.names_at(page))) for page in hashes if page in self._marked}

    def marks(self) -> list[str]:
        """The last pages of all nodes of which there are files."""
        return sorted(self._marked)

    # Paths

    def next(self, page: str) -> list[str]:
        """The pages that follow on `page`."""
        following = [segment.header.hashes[0] for segment in self._below.get(page, ())]
        for segment in self.files_of(page):
            index = segment.header.hashes.index(page) + 1
            following += segment.header.hashes[index : index + 1]
        return following

    def before(self, page: str) -> str | None:
        segment = self._pages.get(page)
        if segment is None:
            return None
        index = segment.header.hashes.index(page)
        return segment.header.hashes[index - 1] if index else segment.header.parent

    def path_to(self, page: str) -> StoredPath | None:
        """What a prompt begins with whose last page is `page`; None where a page of it isn't
        there, or its tokens aren't known."""
        parts: list[array[int]] = []
        names: dict[str, tuple[Name, ...]] = {}
        above: str | None = page
        while above is not None:
            segment = self._pages.get(above)
            if segment is None or not segment.header.tokens:
                return None
            hashes = segment.header.hashes
            pages = hashes.index(above) + 1
            tokens = unpacked(segment.header.tokens)
            parts.append(tokens[: len(tokens) // len(hashes) * pages])
            names.update(self.names_along(hashes[:pages]))
            above = segment.header.parent
        tokens = array("q")
        for part in reversed(parts):
            tokens.extend(part)
        return StoredPath(tokens, names)

    def below(self, hashes: Iterable[str]) -> dict[str, None]:
        """`hashes` and all pages below them."""
        found: dict[str, None] = {}
        stack = list(hashes)
        while stack:
            page = stack.pop()
            if page not in found:
                found[page] = None
                stack += self.next(page)
        return found

    def of_documents(
        self, ends: Sequence[tuple[str, int]], is_kept: Callable[[str], bool]
    ) -> set[str]:
        """The pages of documents with what hangs below them; of the pages before their last only
        those that belong to nothing else.

        Args:
            ends: The last page of each, and its number of pages.
            is_kept: Whether a document that stays ends with a page.
        """
        pages = [page for page, _ in ends]
        for page in set(pages).difference(self._pages):
            # Its end has left to keep the budget: all that is left of the node goes.
            for segment in self._marked.get(page, ()):
                pages += segment.header.hashes
        gone = set(self.below(pages))
        for end, length in ends:
            above = self.before(end)
            for _ in range(length - 1):
                if above is None or is_kept(above) or not gone.issuperset(self.next(above)):
                    break
                if above not in self._pages:  # damaged: the beginning lies beyond it
                    for each in self._marked.get(self._pages[end].header.mark, ()):
                        gone.update(each.header.hashes)
                    break
                gone.add(above)
                above = self.before(above)
        return gone

    def victims(self, priority: Callable[[str], float]) -> Iterator[Segment]:
        """Files with nothing below them, the lowest `priority` of their marks first, ties by
        name; the caller may remove what it is given."""

        def entry(segment: Segment) -> tuple[float, str]:
            return priority(segment.header.mark), segment.path.name

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


def _drop(index: dict[_K, list[Segment]], key: _K, segment: Segment) -> None:
    index[key].remove(segment)
    if not index[key]:
        del index[key]
