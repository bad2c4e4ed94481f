"""A document: the unit that is stored, retrieved and whose KV cache is shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from rag_radix_frontend.errors import SourceError

_FIELDS = {"id", "text", "version", "metadata"}


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a collection.

    `id` names it, `version` its revision ("" where there are none); `metadata` is the
    user's own, and nothing but `==` looks at it.
    """

    id: str
    text: str
    version: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


def parse_document(line: bytes) -> Document:
    """The document in one JSON line.

    Raises:
        SourceError: the line isn't a JSON object with a text `id` and a text `text`.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise SourceError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"a document is a JSON object, this is a {type(value).__name__}")
    if unknown := sorted(value.keys() - _FIELDS):
        raise SourceError(f"unknown field {unknown[0]!r}; put a field of your own in 'metadata'")
    for name in ("id", "text"):
        if name not in value:
            raise SourceError(f"field {name!r} is missing")
        if not isinstance(value[name], str) or not value[name].strip():
            raise SourceError(f"field {name!r} must be text that isn't empty")
    if not isinstance(value.get("version", ""), str):
        raise SourceError("field 'version' must be text")
    if not isinstance(value.get("metadata", {}), dict):
        raise SourceError("field 'metadata' must be an object")
    return Document(**value)


def format_document(document: Document) -> bytes:
    """The JSON line, newline included, that `parse_document` reads back."""
    value: dict[str, Any] = {"id": document.id, "text": document.text}
    if document.version:
        value["version"] = document.version
    if document.metadata:
        value["metadata"] = dict(document.metadata)
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
