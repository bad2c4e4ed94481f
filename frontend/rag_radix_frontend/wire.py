"""The `rag` entry of a request's `custom_params`: which documents its prompt holds, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rag_radix_frontend.document import Document
from rag_radix_frontend.retrieved_text import RetrievedText

# How the server's messages begin about a speculation that it doesn't take, or no longer runs.
REFUSED = "speculation refused"
ENDED = "speculation ended"


def placed_annotation(
    text: str | None,
    *,
    strict: bool = False,
    speculative: bool = False,
    salted: bool = False,
    counts: bool = True,
) -> dict[str, Any] | None:
    """`custom_params` for a prompt sent as this text; None when there is nothing to say of it.

    Ranges are half-open and count characters of the text. If the request is `salted`, its salt
    covers what follows the last public document, or all if there is none. It `counts` unless it
    goes on with a request that has been counted.
    """
    if not isinstance(text, RetrievedText) or not text.documents:
        if counts and not speculative:
            return None
        return _custom_params({"documents": []}, speculative=speculative, counts=counts)
    documents = [
        {**_identity(placed.document), "start": placed.start, "end": placed.end}
        for placed in text.documents
    ]
    rag: dict[str, Any] = {"documents": documents, "unit": "char"}
    if salted and (public := text.public_documents):
        rag["salt_from"] = public
    return _custom_params(rag, strict=strict, speculative=speculative, counts=counts)


def quoted_annotation(
    documents: Sequence[tuple[Document, str]],
    *,
    strict: bool = False,
    salt_from: int | None = None,
) -> dict[str, Any]:
    """`custom_params` for chat messages that hold these documents, quoted as given, in order."""
    rag: dict[str, Any] = {
        "documents": [{**_identity(document), "text": text} for document, text in documents]
    }
    if salt_from is not None:
        rag["salt_from"] = salt_from
    return _custom_params(rag, strict=strict)


def _identity(document: Document) -> dict[str, Any]:
    identity = {"id": document.id}
    if document.version:
        identity["version"] = document.version
    return identity


def _custom_params(
    rag: dict[str, Any], *, strict: bool = False, speculative: bool = False, counts: bool = True
) -> dict[str, Any]:
    if strict:
        rag["strict"] = True
    if speculative:
        rag["speculative"] = True
    if not counts:
        rag["counts"] = False
    return {"rag": rag}
