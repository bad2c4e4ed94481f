"""Pages that may be written, until they are or must not be any more."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rag_radix.storage.segment import Name

_RETRY_S = 30.0
_LONGEST_RETRY_S = 960.0


@dataclass(slots=True, eq=False)
class Promise:
    """Pages that may be written.

    Attributes:
        parent: By page, the one before it.
        mark: Hash of the last page of their node.
        names: Documents of the node.
        namespace: Name of the one that it is in.
        tokens: Of all pages; none where files mustn't have them.
        is_broken: Whether a page of it was discarded before it was written.
    """

    parent: dict[str, str | None]
    mark: str
    names: tuple[Name, ...]
    namespace: str
    tokens: array[int]
    is_broken: bool = False

    def tokens_of(self, pages: Sequence[str]) -> array[int]:
        """Of consecutive pages."""
        per_page = len(self.tokens) // len(self.parent)
        first = list(self.parent).index(pages[0])
        return self.tokens[first * per_page : (first + len(pages)) * per_page]


class Promises:
    """By page. What couldn't be kept is tried again after a while, later ever more rarely."""

    def __init__(self) -> None:
        self._promised: dict[str, Promise] = {}
        self._retry_s = _RETRY_S
        self._retry_at_s: float | None = None

    def __len__(self) -> int:
        return len(self._promised)

    def make(
        self,
        parent: str | None,
        hashes: Sequence[str],
        names: Sequence[Name],
        namespace: str,
        tokens: array[int] | None,
    ) -> None:
        """Promise the pages of a node behind the page `parent`."""
        chain = dict(zip(hashes, (parent, *hashes[:-1]), strict=True))
        promise = Promise(chain, hashes[-1], tuple(names), namespace, tokens or array("q"))
        self._promised.update(dict.fromkeys(hashes, promise))

    def take(self, hashes: Sequence[str]) -> list[tuple[Promise, range]]:
        """What was promised of `hashes`, consecutive pages, and is promised no more: by promise,
        and which of `hashes`. The nodes may have been cut since `hashes` were one's, or been
        promised anew in other pieces; nothing of a promise of which a page was discarded."""
        promises = [self._promised.pop(page, None) for page in hashes]
        taken, start = [], 0
        for promise, run in groupby(promises):
            end = start + len(list(run))
            if promise is not None and not promise.is_broken:
                taken.append((promise, range(start, end)))
            start = end
        return taken

    def discard(self, page: str) -> None:
        if (promise := self._promised.pop(page, None)) is not None:
            promise.is_broken = True

    def pages_in(self, namespace: str) -> list[str]:
        return [page for page, each in self._promised.items() if each.namespace == namespace]

    def clear(self) -> None:
        self._promised.clear()

    def give_up(self, promise: Promise) -> None:
        """A part of a node isn't written: what follows in it is of no use."""
        for page in promise.parent:
            if self._promised.get(page) is promise:
                del self._promised[page]
        if self._retry_at_s is None:
            self._retry_at_s = time.monotonic() + self._retry_s

    def is_to_try_again(self) -> bool:
        """Whether it is time to write again what was given up; longer each time until nothing
        is."""
        if self._retry_at_s is None:
            self._retry_s = _RETRY_S
            return False
        if time.monotonic() < self._retry_at_s:
            return False
        self._retry_at_s = None
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
        return True
