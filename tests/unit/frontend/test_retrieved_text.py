from __future__ import annotations

import pickle

import sglang as sgl
from hypothesis import given
from hypothesis import strategies as st
from rag_radix_frontend import Document, RetrievedText, ScoredDocument
from rag_radix_frontend.retrieved_text import PlacedDocument
from rag_radix_frontend.template import compile_template, render_documents

_RENDER = compile_template("<{text}|{id}>\n")
_DOCUMENTS = st.builds(Document, id=st.text("ab", min_size=1), text=st.text("xyz", min_size=1))
_RETRIEVED = st.lists(_DOCUMENTS, max_size=3).map(
    lambda documents: render_documents([ScoredDocument(d, 1.0) for d in documents], _RENDER)
)
_PIECES = st.lists(st.one_of(st.text("pq", max_size=4), _RETRIEVED), max_size=8)


def assert_in_place(text: str) -> None:
    assert isinstance(text, RetrievedText)
    end = 0
    for placed in text.documents:
        assert end <= placed.start < placed.end
        assert str.__getitem__(text, slice(placed.start, placed.end)) == _RENDER(placed.document)
        end = placed.end


@given(_PIECES)
def test_concatenation_keeps_every_document_at_its_text(pieces: list[str]) -> None:
    text: str = RetrievedText()
    for piece in pieces:
        text = text + piece
    assert_in_place(text)
    assert text == "".join(pieces)
    assert isinstance(text, RetrievedText)
    expected = [p.document for piece in pieces for p in getattr(piece, "documents", ())]
    assert [placed.document for placed in text.documents] == expected


@given(_RETRIEVED, st.text(max_size=3), st.integers(-30, 30), st.integers(-30, 30))
def test_a_slice_keeps_the_documents_that_lie_in_it(
    retrieved: RetrievedText, before: str, start: int, stop: int
) -> None:
    text = before + retrieved
    part = text[start:stop]
    assert part == str.__getitem__(text, slice(start, stop))
    assert_in_place(part)
    bounds = range(*slice(start, stop).indices(len(text)))
    inside = [p for p in text.documents if bounds.start <= p.start and p.end <= bounds.stop]
    assert [p.document for p in part.documents] == [p.document for p in inside]


def test_copying_with_str_keeps_documents_and_other_methods_return_plain_text() -> None:
    text = RetrievedText("abc", [PlacedDocument(Document("d", "b"), 0.5, 1, 2)])
    assert str(text) is text
    assert pickle.loads(pickle.dumps(text)).documents == text.documents
    assert type(text.upper()) is str
    assert text[1] == "b"
    assert text[::2] == "ac"


def test_values_are_those_of_the_documents() -> None:
    text = RetrievedText("abc", [PlacedDocument(Document("d", "b"), 0.5, 1, 2)])
    assert (text.ids, text.scores, text.texts) == (["d"], [0.5], ["b"])


def test_it_adds_up_with_expressions_of_sglang() -> None:
    text = RetrievedText("abc", [PlacedDocument(Document("d", "b"), 0.5, 1, 2)])
    before, after = (text + sgl.gen("x")).expr_list[0], (sgl.gen("x") + text).expr_list[1]
    assert before.value is text
    assert after.value is text
