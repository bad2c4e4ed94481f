"""Text that knows which documents are in it, and where.

A program's state is one growing string that SGLang appends to, copies, slices and joins.
Documents ride on that string itself, so they stay at the right place whatever SGLang does with
it: role prefixes, forks, joins, reuse in another state. The string a request sends says where
its documents are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self, SupportsIndex

from rag_radix_frontend.document import Document


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A document rendered at the half-open range [start, end) of characters of a text.

    If it is `public`, so is all of the text before it.
    """

    document: Document
    score: float
    start: int
    end: int
    public: bool = False


class RetrievedText(str):
    """A string with the documents in it, in ascending, disjoint ranges.

    Concatenation and slicing move the documents along; a slice keeps those that lie in it
    completely. Every other string method returns plain text.
    """

    documents: tuple[PlacedDocument, ...]

    def __new__(cls, text: str = "", documents: Iterable[PlacedDocument] = ()) -> Self:
        self = super().__new__(cls, text)
        self.documents = tuple(documents)
        return self

    @property
    def ids(self) -> list[str]:
        return [placed.document.id for placed in self.documents]

    @property
    def scores(self) -> list[float]:
        return [placed.score for placed in self.documents]

    @property
    def texts(self) -> list[str]:
        """The documents' own texts, without what the template put around them."""
        return [placed.document.text for placed in self.documents]

    @property
    def public_documents(self) -> int:
        """How many documents there are up to the last public one."""
        return max((n for n, placed in enumerate(self.documents, 1) if placed.public), default=0)

    # SGLang copies a state's text with str(text), which would leave the documents behind.
    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> RetrievedText:
        if not isinstance(other, str):
            return NotImplemented
        return RetrievedText(str.__add__(self, other), (*self.documents, *_moved(other, len(self))))

    def __radd__(self, other: str) -> RetrievedText:
        if not isinstance(other, str):
            return NotImplemented
        return RetrievedText(str.__add__(other, self), _moved(self, len(other)))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        if not isinstance(key, slice):
            return text
        start, stop, step = key.indices(len(self))
        if step != 1:
            return text
        inside = [p for p in self.documents if start <= p.start and p.end <= stop]
        return RetrievedText(
            text, [replace(p, start=p.start - start, end=p.end - start) for p in inside]
        )


def documents_in(text: str) -> tuple[PlacedDocument, ...]:
    """The documents of a text, which may be a plain one."""
    return text.documents if isinstance(text, RetrievedText) else ()


def _moved(text: str, by: int) -> Iterable[PlacedDocument]:
    return (replace(p, start=p.start + by, end=p.end + by) for p in documents_in(text))
