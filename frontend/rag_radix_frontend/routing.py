"""Requests with the same leading documents go to the same of several servers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rag_radix_frontend.document import Document
from rag_radix_frontend.retrieved_text import RetrievedText

ROUTING_HEADER = "X-SMG-Routing-Key"
"""The header by which SGLang's router, with `--policy manual`, keeps requests together."""


def routing_key(documents: Sequence[Document]) -> str:
    """A key of some documents, by ids and versions, in their order: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        for part in (document.id, document.version):
            digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


def routing_headers(text: str, documents: int) -> dict[str, str]:
    """The header for a prompt by its first so many documents; none where it holds no document."""
    if not documents or not isinstance(text, RetrievedText) or not text.documents:
        return {}
    return {ROUTING_HEADER: routing_key([each.document for each in text.documents[:documents]])}
