"""What files may take on disk, and which leave for it."""

from __future__ import annotations

from collections.abc import Callable

from rag_radix.storage.directory import Directory, FileCounters
from rag_radix.storage.segment import Header, segment_bytes

# Of the budget: made free beyond what is needed, so that not every write has to look for victims.
_EVICTED_AHEAD = 0.02


class Budget:
    """Lets files of lowest priority leave a directory, the last of a path first. One thread at a
    time may use it.

    Args:
        there: The directory.
        limit_bytes: What its files may take; None for as much as there is.
        priority: What a mark is worth.
    """

    def __init__(
        self,
        there: Directory,
        limit_bytes: int | None,
        priority: Callable[[str], float],
        counters: FileCounters,
    ) -> None:
        self._there = there
        self._index = there.index
        self._limit_bytes = limit_bytes
        self._priority = priority
        self._counters = counters

    def keep(self) -> None:
        """Let leave what is too much, whatever it is worth: there may have been more room before
        a start, or other servers have written."""
        limit = self._limit_bytes
        if limit is None or self._index.bytes <= limit:
            return
        for segment in self._index.victims(self._priority):
            if self._index.bytes <= limit:
                return
            self._there.remove(segment)
            self._counters.evicted_files += 1

    def make_room(self, header: Header) -> bool:
        """For a file; False when what would have to leave is worth more."""
        index, limit = self._index, self._limit_bytes
        if limit is None or index.bytes + (wanted := segment_bytes(header)) <= limit:
            return True
        priority = self._priority(header.mark)
        goal = limit - wanted - int(_EVICTED_AHEAD * limit)
        above = index.file_of(header.parent)
        for segment in index.victims(self._priority):
            if index.bytes <= goal or (
                segment is above or self._priority(segment.header.mark) > priority
            ):
                break
            self._there.remove(segment)
            self._counters.evicted_files += 1
        return index.bytes + wanted <= limit
