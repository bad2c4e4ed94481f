"""In which order a prompt holds the documents that were retrieved for it.

The KV cache of a document is good behind the same documents only, so the same documents in another
order are computed again. `score` takes the retriever's order. `canonical` gives the same documents
the same order every time. `cached_first` has the server say which order has the longest cached
prefix. The last two can change answers: models read the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from rag_radix_frontend.errors import ArgumentError
from rag_radix_frontend.retriever import ScoredDocument

Order = Literal["score", "canonical", "cached_first"]

Documents = tuple[ScoredDocument, ...]
# The indices of documents, which it is given in the retriever's order, in an order of its own.
Ask = Callable[[Documents], Sequence[int]]


def check_order(order: str) -> None:
    """Raises ArgumentError for an order that doesn't exist."""
    if order not in get_args(Order):
        raise ArgumentError(
            f"unknown order {order!r}; valid orders are {', '.join(get_args(Order))}"
        )


class Arrangement:
    """Arranges the documents of one retrieval's stages, the same ones always alike.

    Otherwise a guess that was right could stand in another order than the final documents, since
    computing it changes what is cached.

    Args:
        order: By what.
        ask: Asked for `cached_first`.
    """

    def __init__(self, order: Order, ask: Ask) -> None:
        self._order = order
        self._ask = ask
        self._known: dict[frozenset[tuple[str, str, str]], list[tuple[str, str, str]]] = {}

    def __call__(self, documents: Documents) -> Documents:
        if self._order == "canonical":
            return tuple(sorted(documents, key=text_identity))
        if self._order == "score" or len(documents) < 2:
            return documents
        these = frozenset(text_identity(each) for each in documents)
        if these not in self._known:
            asked = self._ask(documents)
            self._known[these] = [text_identity(documents[index]) for index in asked]
        known = self._known[these]
        return tuple(sorted(documents, key=lambda each: known.index(text_identity(each))))


def text_identity(scored: ScoredDocument) -> tuple[str, str, str]:
    """What makes two retrieved documents the same text; scores and metadata don't matter."""
    document = scored.document
    return document.id, document.version, document.text
