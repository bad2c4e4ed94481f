"""`POST /rag/order`: which order of a prompt's documents has the longest cached prefix.

The HTTP process tokenizes what comes before the documents and each of them, as it would for a
request; the scheduler looks the orders up in its tree, without touching it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import orjson

from rag_radix import wire
from rag_radix.cached_order import Cached, cached_first
from rag_radix.cached_prefix import CachedPrefix, PrefixTracker
from rag_radix.document import Annotation, DocumentSpan
from rag_radix.namespaces import prompt_key
from rag_radix.placement import piece_tokenizer

MAX_DOCUMENTS = 64

_FIELDS = {"text": str, "documents": list, "rag": dict, "extra_key": str, "cache_salt": str}
_KINDS = {str: "a string", list: "an array", dict: "an object"}


def parse(body: bytes, tokenizer: Any, context_tokens: int) -> dict[str, Any]:
    """The scheduler's question from the body of a request.

    Args:
        body: ``{"text": ..., "documents": [...]}``: the prompt up to the first document, and the
            documents' texts as they are to stand in it, one right after the other, in the order
            preferred; with the request's ``extra_key`` and ``cache_salt``, if it has them, and
            with the annotation ``rag`` that it would have if it ended with the text.
        tokenizer: The server's.
        context_tokens: The longest prompt that the model can hold.

    Raises:
        ValueError: The body is malformed or its prompt too long; the message names what.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body isn't JSON: {error}") from None
    if not isinstance(value, dict) or not {"text", "documents"} <= set(value) <= set(_FIELDS):
        raise ValueError(
            'the body must be an object with "text" and "documents", and perhaps "rag", '
            '"extra_key" and "cache_salt"'
        )
    for name, kind in _FIELDS.items():
        if name in value and not isinstance(value[name], kind):
            raise ValueError(f"{name} must be {_KINDS[kind]}")
    texts = value["documents"]
    if len(texts) > MAX_DOCUMENTS:
        raise ValueError(f"documents has {len(texts)} entries, at most {MAX_DOCUMENTS} are allowed")
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("documents must be strings, none of them empty")
    before = wire.parse(value) or wire.RawAnnotation()
    if before.texts or (before.spans and before.unit != "char"):
        raise ValueError('rag must have the documents of the text with start, end and unit "char"')
    wire.check_within(before, len(value["text"]), "the text")
    if before.salt_from is not None and not value.get("cache_salt"):
        raise ValueError("rag.salt_from needs a cache_salt beside it")
    pieces = None if tokenizer is None else piece_tokenizer(tokenizer)
    if pieces is None:
        raise ValueError("this server's tokenizer can't tokenize a prompt in pieces")
    ends = list(accumulate((len(text) for text in texts), initial=len(value["text"])))
    # By index: who asked may have given documents of the text any ids.
    ranges = [*((span.start, span.end) for span in before.spans), *pairwise(ends)]
    place = pieces.place(
        value["text"] + "".join(texts),
        [DocumentSpan(str(index), start, end) for index, (start, end) in enumerate(ranges)],
    )
    ids = place.input_ids
    if len(ids) > context_tokens:
        raise ValueError(
            f"text and documents have {len(ids)} tokens, more than the model's context of "
            f"{context_tokens}"
        )
    documents: list[list[int]] = [[] for _ in ranges]
    starts = [len(ids)]
    for span in place.documents:
        documents[int(span.id)] = ids[span.start : span.end]
        if int(span.id) >= len(before.spans):
            starts.append(span.start)
    annotation = Annotation(place.documents, salt_from=place.salt_from(before.salt_from))
    return {
        "prefix": ids[: min(starts)],
        "documents": documents[len(before.spans) :],
        "extra_key": value.get("extra_key"),
        "cache_salt": value.get("cache_salt"),
        "shared_tokens": annotation.shared_tokens,
    }


def answer(tree: Any, question: dict[str, Any]) -> dict[str, Any]:
    """``{"order": [...], "cached_tokens": n}`` for what `parse` returned."""
    page_size = tree.page_size
    shared_tokens = tree.shared_tokens(question["shared_tokens"])
    tracker = PrefixTracker(tree.tree_core)

    def look_up(order: Sequence[int]) -> Cached:
        ids = array("q", question["prefix"])
        for index in order:
            ids.extend(question["documents"][index])
        whole = len(ids) // page_size * page_size
        key = prompt_key(
            ids,
            question["extra_key"],
            question["cache_salt"],
            limit=whole,
            shared_tokens=shared_tokens,
        )
        prefix = CachedPrefix(key)
        tracker.refresh(prefix)
        return Cached(prefix.tokens, prefix.tokens == whole)

    order, tokens = cached_first(len(question["documents"]), look_up)
    return {"order": order, "cached_tokens": tokens}
