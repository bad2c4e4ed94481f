"""Documents of chat completions, found by their text in the templated prompt.

SGLang renders a chat and tokenizes it in one go, before there is a request to admit. While it
does so for an annotated request, a `ChatPlacement` is current in the thread; the hooks hand it
the rendered prompt, and it answers with the tokens of the prompt cut at the documents.

Which occurrence of a text is meant is the rule of `rag_radix.placement.locate`. When a document
isn't found (the template changed its text, or the model has an encoder of its own that never
renders a prompt), none of the request's documents is placed: the prompt is tokenized as it would
be without an annotation, and the request is served unannotated and counted, or refused when the
annotation says `strict`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rag_radix import wire
from rag_radix.admission import counters, settled, with_annotation
from rag_radix.document import DocumentSpan
from rag_radix.errors import AnnotationError
from rag_radix.placement import PlacedPrompt, locate, piece_tokenizer

_current: ContextVar[ChatPlacement | None] = ContextVar("rag_radix_chat", default=None)


def current() -> ChatPlacement | None:
    """The placement under way in this thread."""
    return _current.get()


class ChatPlacement:
    """Places the documents of one chat completion.

    Args:
        raw: The request's annotation.

    Raises:
        AnnotationError: The documents carry offsets, which a chat doesn't have.
    """

    def __init__(self, raw: wire.RawAnnotation) -> None:
        if raw.spans:
            raise AnnotationError(
                "rag.documents[0].start",
                "offsets mean nothing in chat completions: give the document's text",
            )
        self._raw = raw
        self._placed: PlacedPrompt | None = None if raw.texts else PlacedPrompt([], ())
        self._reason = AnnotationError(
            "rag.documents", "can't be placed: this model's chats aren't tokenized from one text"
        )

    @contextmanager
    def here(self) -> Iterator[None]:
        """Make this the current placement."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def encode(
        self, tokenizer: Any, prompt: str, *, add_special_tokens: bool = True
    ) -> list[int] | None:
        """Tokenize the rendered prompt in pieces; None when a document isn't in it."""
        pieces = piece_tokenizer(tokenizer)
        if not self._raw.texts or pieces is None:
            return None
        found = locate([document.text for document in self._raw.texts], prompt)
        if isinstance(found, int):
            self._placed = None
            self._reason = AnnotationError(
                f"rag.documents[{found}].text", "is not in the templated prompt at its turn"
            )
            return None
        documents = [
            DocumentSpan(document.id, start, end, document.version)
            for document, (start, end) in zip(self._raw.texts, found, strict=True)
        ]
        self._placed = pieces.place(prompt, documents, add_special_tokens=add_special_tokens)
        return list(self._placed.input_ids)

    def settle(self, request: Any) -> None:
        """Write the outcome into the `GenerateReqInput` that the chat became, in place.

        Raises:
            AnnotationError: A document wasn't found and the annotation is strict.
        """
        placed = self._placed
        # What is added behind the rendered prompt, as the start of an answer, moves no document.
        if placed is not None and placed.input_ids:
            kept = (request.input_ids or [])[: len(placed.input_ids)]
            placed = placed if kept == placed.input_ids else None
        if placed is None:
            if self._raw.strict:
                raise self._reason
            counters.add(unplaced_requests=1)
            rag = None
        else:
            rag = settled(self._raw, placed)
        request.sampling_params = with_annotation(request.sampling_params, rag)
