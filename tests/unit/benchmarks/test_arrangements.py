from __future__ import annotations

import pytest
from rag_radix_benchmarks.arrangements import arranged, canonical, most_cached

from rag_radix.replay.driver import knowledge_tree_replayer
from rag_radix.replay.reference_cost import a10g_mistral_cost_table
from rag_radix.replay.trace import TraceDocument, TraceRequest


def request(*names: str, question: int = 60) -> TraceRequest:
    """32 tokens, the documents of 160 with 16 between them, and a question."""
    documents, at = [], 32
    for name in names:
        documents.append(TraceDocument(name, "", at, at + 160))
        at += 176
    return TraceRequest(0.0, tuple(documents), at - 16 + question)


def ids(request: TraceRequest) -> list[str]:
    return [document.id for document in request.documents]


def test_text_around_documents_keeps_its_place_and_length():
    long, short = TraceDocument("long", "", 10, 110), TraceDocument("short", "", 115, 125)
    before = TraceRequest(1.0, (long, short), 150, 3, "tenant")
    after = arranged(before, [1, 0])
    assert after.documents == (
        TraceDocument("short", "", 10, 20),
        TraceDocument("long", "", 25, 125),
    )
    assert (after.prompt_tokens, after.output_tokens, after.namespace) == (150, 3, "tenant")
    assert arranged(after, [1, 0]) == before


def test_canonical_is_by_id_and_version():
    assert ids(canonical(None, request("c", "a", "b"))) == ["a", "b", "c"]  # type: ignore[arg-type]
    assert request() == canonical(None, request())  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_tree_says_which_order_it_has_most_of(page_size):
    with knowledge_tree_replayer(
        "pgdsf",
        {},
        device_tokens=4_000,
        host_tokens=0,
        longest_request_tokens=1_000,
        cost=a10g_mistral_cost_table(),
        page_size=page_size,
    ) as replayer:
        assert ids(most_cached(replayer, request("a", "b"))) == ["a", "b"]
        replayer.serve(request("b", "a"))
        replayer.serve(request("c"))
        chosen = most_cached(replayer, request("a", "c", "b"))
        assert ids(chosen) == ["b", "a", "c"]
        assert replayer.serve(chosen).hit_documents == 2
