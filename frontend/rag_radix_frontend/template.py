"""How a document becomes text in a prompt.

A rendering depends on the document alone, never on its rank or its neighbours: only then is it
the same text, and the same KV cache, wherever the document is retrieved again.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable

from rag_radix_frontend.document import Document
from rag_radix_frontend.errors import ArgumentError, RetrievalError
from rag_radix_frontend.retrieved_text import PlacedDocument, RetrievedText
from rag_radix_frontend.retriever import ScoredDocument

DEFAULT_TEMPLATE = "{text}\n\n"

Render = Callable[[Document], str]


def compile_template(template: str | Render) -> Render:
    """A function from a document to its text.

    A string may use `{text}`, which it must, and `{id}`; `{{` and `}}` stand for braces.
    A function gets the document and returns its text.

    Raises:
        ArgumentError: the string has another field, lacks `{text}`, or is malformed.
    """
    if callable(template):
        return template
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ArgumentError(f"template {template!r} is malformed: {error}") from None
    fields = [(name, spec, conv) for _, name, spec, conv in parts if name is not None]
    for name, spec, conversion in fields:
        if name not in ("text", "id") or spec or conversion:
            raise ArgumentError(
                f"template {template!r} has the field {name!r}; only {{text}} and {{id}} are "
                "known. For anything else, pass a function of the document"
            )
    if not any(name == "text" for name, _, _ in fields):
        raise ArgumentError(f"template {template!r} lacks {{text}}")
    return lambda document: template.format(text=document.text, id=document.id)


def render_documents(
    found: Iterable[ScoredDocument], render: Render, *, public: bool = False
) -> RetrievedText:
    """The documents one after the other, each one's range being all that `render` returned.

    `public` says whether all may share them.

    Raises:
        RetrievalError: `render` returned something else than text that isn't empty.
    """
    pieces: list[str] = []
    placed: list[PlacedDocument] = []
    end = 0
    for document, score in found:
        piece = render(document)
        if not isinstance(piece, str) or not piece:
            raise RetrievalError(
                f"the template returned {piece!r} for document {document.id!r}; "
                "it must return text that isn't empty"
            )
        start, end = end, end + len(piece)
        pieces.append(piece)
        placed.append(PlacedDocument(document, score, start, end, public))
    return RetrievedText("".join(pieces), placed)
