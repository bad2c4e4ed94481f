"""A trace's requests with their documents in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rag_radix_frontend.ordering import Order

from rag_radix.cached_order import Cached, cached_first
from rag_radix.replay.driver import Replayer
from rag_radix.replay.trace import TraceDocument, TraceRequest

Arrange = Callable[[Replayer, TraceRequest], TraceRequest]


def arranged(request: TraceRequest, order: Sequence[int]) -> TraceRequest:
    """The request with its documents in the order of these indices.

    The text before the first document, between documents and behind the last keeps its place
    and length.
    """
    documents = request.documents
    starts = [document.start for document in documents]
    ends = [0, *(document.end for document in documents)]
    moved: list[TraceDocument] = []
    at = 0
    for place, index in enumerate(order):
        at += starts[place] - ends[place]
        length = documents[index].end - documents[index].start
        moved.append(replace(documents[index], start=at, end=at + length))
        at += length
    return replace(request, documents=tuple(moved))


def canonical(_replayer: Replayer, request: TraceRequest) -> TraceRequest:
    """By id and version."""
    documents = request.documents
    return arranged(
        request,
        sorted(
            range(len(documents)), key=lambda each: (documents[each].id, documents[each].version)
        ),
    )


def most_cached(replayer: Replayer, request: TraceRequest) -> TraceRequest:
    """In the order of which the replayed tree has most now."""

    def look_up(order: Sequence[int]) -> Cached:
        rest = [index for index in range(len(request.documents)) if index not in order]
        whole = arranged(request, [*order, *rest])
        end = whole.documents[len(order) - 1].end
        beginning = replace(
            whole, documents=whole.documents[: len(order)], prompt_tokens=end, output_tokens=0
        )
        tokens = replayer.cached_tokens(beginning)
        return Cached(tokens, tokens >= end // replayer.page_tokens * replayer.page_tokens)

    return arranged(request, cached_first(len(request.documents), look_up)[0])


ARRANGEMENTS: dict[Order, Arrange | None] = {
    "score": None,
    "canonical": canonical,
    "cached_first": most_cached,
}
