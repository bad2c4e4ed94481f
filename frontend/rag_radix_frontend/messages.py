"""Annotations for OpenAI-style clients, which send messages instead of one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rag_radix_frontend.document import Document
from rag_radix_frontend.errors import ArgumentError
from rag_radix_frontend.wire import quoted_annotation


def annotate(
    messages: Sequence[Mapping[str, Any]],
    documents: Iterable[Document],
    *,
    strict: bool = False,
    cache_salt: str | None = None,
    salt_from: int | None = None,
) -> dict[str, Any]:
    """The `extra_body` of a chat completion whose messages contain these documents' texts.

        client.chat.completions.create(
            model=..., messages=messages, extra_body=annotate(messages, documents)
        )

    Documents are given in the order in which they occur, each whole within one message. White
    space at a text's ends doesn't count, since chat templates trim messages. `strict` makes the
    server refuse the request when its chat template changes a text so that it can't be found;
    otherwise it then serves it as one without documents.

    `cache_salt` keeps what is cached of the request from all who don't have it. The first
    `salt_from` documents are public, and so is what precedes them: all share it, and the salt
    covers what follows. With 0 only what precedes the first document is.

    Raises:
        ArgumentError: names the first document that isn't a `Document` or doesn't occur after the
            one before it, or says what is wrong with the salt.
    """
    if salt_from is not None and not cache_salt:
        raise ArgumentError("salt_from needs a cache_salt: without one nothing is private")
    texts = [text for message in messages for text in _texts(message)]
    quoted: list[tuple[Document, str]] = []
    at, start = 0, 0
    for document in documents:
        if not isinstance(document, Document):
            raise ArgumentError(f"{document!r} is no Document: give Document(id=..., text=...)")
        text = document.text.strip()
        if not text:
            raise ArgumentError(f"document {document.id!r} has no text")
        while at < len(texts) and (found := texts[at].find(text, start)) < 0:
            at, start = at + 1, 0
        if at == len(texts):
            after = f" after document {quoted[-1][0].id!r}" if quoted else ""
            raise ArgumentError(
                f"the text of document {document.id!r} doesn't occur in the messages{after}; "
                "give the documents in the order in which the messages quote them"
            )
        start = found + len(text)
        quoted.append((document, text))
    if salt_from is not None and not 0 <= salt_from <= len(quoted):
        raise ArgumentError(
            f"salt_from must be from 0 to {len(quoted)}, the number of documents, not {salt_from}"
        )
    extra: dict[str, Any] = {
        "custom_params": quoted_annotation(quoted, strict=strict, salt_from=salt_from)
    }
    if cache_salt:
        extra["cache_salt"] = cache_salt
    return extra


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if part.get("type") == "text"]
