"""Where the documents of a prompt are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """One retrieved document at its place in a prompt.

    Attributes:
        id: Name of the document; used for statistics and control, never to decide reuse.
        start: First token of the document.
        end: One past its last token; always greater than `start`.
        version: Revision of the document, or "" when the client gave none.
    """

    id: str
    start: int
    end: int
    version: str = ""


@dataclass(frozen=True, slots=True)
class Annotation:
    """What a request says about its documents; token offsets into its `input_ids`.

    Attributes:
        documents: Ascending and disjoint spans.
        speculative: The request is a guess that may be refused or cancelled.
        salt_from: So many documents come before what the request's salt covers, which begins where
            they end, or at the first document; None when it covers all of the prompt.
        counts: The request is a retrieval of its own in the statistics.
    """

    documents: tuple[DocumentSpan, ...]
    speculative: bool = False
    salt_from: int | None = None
    counts: bool = True

    @property
    def shared_tokens(self) -> int:
        """How much of the prompt a salt doesn't cover."""
        if self.salt_from is None or not self.documents:
            return 0
        return self.documents[self.salt_from - 1].end if self.salt_from else self.documents[0].start
