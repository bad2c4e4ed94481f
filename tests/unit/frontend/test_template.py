from __future__ import annotations

import pytest
from rag_radix_frontend import Document, ScoredDocument
from rag_radix_frontend.errors import ArgumentError, RetrievalError
from rag_radix_frontend.template import DEFAULT_TEMPLATE, compile_template, render_documents


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        (DEFAULT_TEMPLATE, "A {brace}\n\n"),
        ("[{id}] {text}", "[a] A {brace}"),
        ("{{{text}}}", "{A {brace}}"),
        (lambda document: document.metadata["title"], "Title"),
    ],
)
def test_a_template_renders_the_document_alone(template: object, rendered: str) -> None:
    document = Document("a", "A {brace}", metadata={"title": "Title"})
    assert compile_template(template)(document) == rendered  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("Document {rank}: {text}", "'rank'"),
        ("{text} {}", "''"),
        ("{text!r}", "'text'"),
        ("{text:>9}", "'text'"),
        ("{id}", "lacks {text}"),
        ("{text", "malformed"),
    ],
)
def test_a_template_that_cannot_work_is_refused(template: str, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        compile_template(template)


@pytest.mark.parametrize("rendered", ["", None])
def test_a_function_that_returns_no_text_is_reported_with_the_document(rendered: object) -> None:
    found = [ScoredDocument(Document("wiki/7", "x"), 1.0)]
    with pytest.raises(RetrievalError, match="wiki/7"):
        render_documents(found, lambda _: rendered)  # type: ignore[arg-type, return-value]


def test_a_rendering_does_not_depend_on_rank_or_neighbours() -> None:
    first, second = (ScoredDocument(Document(i, f"text of {i}"), 1.0) for i in "ab")
    render = compile_template(DEFAULT_TEMPLATE)
    one, two = render_documents([first, second], render), render_documents([second, first], render)
    assert {p.document.id: one[p.start : p.end] for p in one.documents} == {
        p.document.id: two[p.start : p.end] for p in two.documents
    }
