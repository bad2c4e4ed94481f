from __future__ import annotations

import pytest
from rag_radix_frontend import Document, ScoredDocument
from rag_radix_frontend.errors import ArgumentError
from rag_radix_frontend.ordering import Arrangement, check_order


def found(*names: str) -> tuple[ScoredDocument, ...]:
    return tuple(
        ScoredDocument(Document(id=name, text=f"text of {name}"), 1 / rank)
        for rank, name in enumerate(names, 1)
    )


def ids(documents):
    return [each.document.id for each in documents]


def never(documents):
    raise AssertionError("nothing to ask")


def test_score_is_the_retrievers_order():
    assert ids(Arrangement("score", never)(found("c", "a", "b"))) == ["c", "a", "b"]


def test_canonical_is_the_same_for_the_same_documents():
    arrange = Arrangement("canonical", never)
    assert ids(arrange(found("c", "a", "b"))) == ids(arrange(found("b", "c", "a"))) == [*"abc"]


def test_scores_stay_with_their_documents():
    arranged = Arrangement("canonical", never)(found("b", "a"))
    assert [(each.document.id, each.score) for each in arranged] == [("a", 0.5), ("b", 1.0)]


def test_cached_first_asks_once_for_the_same_documents():
    asked = []

    def ask(documents):
        asked.append(ids(documents))
        return [2, 0, 1]

    arrange = Arrangement("cached_first", ask)
    assert ids(arrange(found("a", "b", "c"))) == ["c", "a", "b"]
    assert ids(arrange(found("b", "c", "a"))) == ["c", "a", "b"]
    assert ids(arrange(found("d", "b", "c"))) == ["c", "d", "b"]
    assert asked == [["a", "b", "c"], ["d", "b", "c"]]


def test_one_document_or_none_has_one_order():
    arrange = Arrangement("cached_first", never)
    assert ids(arrange(found("a"))) == ["a"]
    assert arrange(()) == ()


def test_an_unknown_order_is_refused():
    with pytest.raises(ArgumentError, match="score, canonical, cached_first"):
        check_order("rank")
