"""The annotation schema: what is accepted, and what each mistake is called."""

from __future__ import annotations

from typing import Any

import pytest

from rag_radix import wire
from rag_radix.document import Annotation, DocumentSpan
from rag_radix.errors import AnnotationError


def document(**fields: Any) -> dict[str, Any]:
    return {"id": "d", "start": 0, "end": 4, **fields}


def without(name: str) -> dict[str, Any]:
    return {k: v for k, v in document().items() if k != name}


def rag(*documents: Any, **fields: Any) -> dict[str, Any]:
    return {"rag": {"documents": list(documents), **fields}}


def test_requests_without_the_field_are_unannotated() -> None:
    assert wire.parse(None) is None
    assert wire.parse({}) is None
    assert wire.parse({"thinking_budget": 3}) is None
    assert wire.spans(None) is None
    assert wire.spans({"thinking_budget": 3}) is None


def test_optional_fields_have_defaults() -> None:
    assert wire.parse(rag(document())) == wire.RawAnnotation(
        spans=(DocumentSpan("d", 0, 4, ""),),
        texts=(),
        unit="token",
        speculative=False,
        strict=False,
    )


def test_everything_the_schema_knows_is_read() -> None:
    raw = wire.parse(
        rag(
            document(id="a", version="3"),
            document(id="b", start=4, end=9),
            unit="char",
            speculative=True,
            strict=True,
            salt_from=1,
            counts=False,
        )
    )
    assert raw == wire.RawAnnotation(
        spans=(DocumentSpan("a", 0, 4, "3"), DocumentSpan("b", 4, 9)),
        unit="char",
        speculative=True,
        strict=True,
        salt_from=1,
        counts=False,
    )


def test_documents_may_carry_their_text() -> None:
    raw = wire.parse(rag({"id": "a", "text": " body\n", "version": "1"}))
    assert raw is not None
    assert raw.texts == (wire.DocumentText("a", " body\n", "1"),)
    assert raw.spans == ()


def test_a_request_may_have_no_documents() -> None:
    raw = wire.parse(rag(speculative=True))
    assert raw == wire.RawAnnotation(speculative=True)


def test_the_same_document_may_occur_twice() -> None:
    raw = wire.parse(rag(document(), document(start=4, end=8)))
    assert raw is not None
    assert [span.id for span in raw.spans] == ["d", "d"]


TEXT = {"id": "d", "text": "body"}

MALFORMED: list[tuple[Any, str]] = [
    ("rag", "custom_params"),
    (["rag"], "custom_params"),
    (7, "custom_params"),
    ({"rag": None}, "rag"),
    ({"rag": []}, "rag"),
    ({"rag": {}}, "rag.documents"),
    ({"rag": {"documents": None}}, "rag.documents"),
    ({"rag": {"documents": {}}}, "rag.documents"),
    (rag(document(), docs=[]), "rag.docs"),
    (rag(document(), unit="byte"), "rag.unit"),
    (rag(document(), unit=None), "rag.unit"),
    (rag(document(), unit=["token"]), "rag.unit"),
    (rag(document(), speculative=1), "rag.speculative"),
    (rag(document(), strict="true"), "rag.strict"),
    (rag(document(), counts=None), "rag.counts"),
    (rag("d"), "rag.documents[0]"),
    (rag(document(), None), "rag.documents[1]"),
    (rag(document(title="x")), "rag.documents[0].title"),
    (rag(without("id")), "rag.documents[0].id"),
    (rag(document(id="")), "rag.documents[0].id"),
    (rag(document(id=7)), "rag.documents[0].id"),
    (rag(document(id="x" * 513)), "rag.documents[0].id"),
    (rag(document(id="\ud800")), "rag.documents[0].id"),
    (rag(document(version=3)), "rag.documents[0].version"),
    (rag(document(version=None)), "rag.documents[0].version"),
    (rag(document(version="x" * 513)), "rag.documents[0].version"),
    (rag(without("start")), "rag.documents[0].start"),
    (rag(without("end")), "rag.documents[0].end"),
    (rag(document(start=True)), "rag.documents[0].start"),
    (rag(document(start=0.0)), "rag.documents[0].start"),
    (rag(document(start="0")), "rag.documents[0].start"),
    (rag(document(end=None)), "rag.documents[0].end"),
    (rag(document(end=4.0)), "rag.documents[0].end"),
    (rag(document(start=-1)), "rag.documents[0].start"),
    (rag(document(start=4)), "rag.documents[0].end"),
    (rag(document(start=5)), "rag.documents[0].end"),
    (rag(document(), document(start=3, end=8)), "rag.documents[1].start"),
    (rag(document(start=4, end=8), document()), "rag.documents[1].start"),
    (rag({**TEXT, "start": 0}), "rag.documents[0].start"),
    (rag({**TEXT, "end": 4}), "rag.documents[0].end"),
    (rag({"id": "d", "text": 4}), "rag.documents[0].text"),
    (rag({"id": "d", "text": " \n"}), "rag.documents[0].text"),
    (rag(TEXT, document()), "rag.documents[1]"),
    (rag(*[document(start=i, end=i + 1) for i in range(1025)]), "rag.documents"),
]


@pytest.mark.parametrize(("custom_params", "field"), MALFORMED)
def test_a_mistake_is_refused_by_the_name_of_its_field(custom_params: Any, field: str) -> None:
    with pytest.raises(AnnotationError) as error:
        wire.parse(custom_params)
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: ")
    assert len(str(error.value)) < 300


def test_the_largest_allowed_annotation_is_accepted() -> None:
    documents = [document(id="x" * 512, start=i, end=i + 1) for i in range(1024)]
    raw = wire.parse(rag(*documents))
    assert raw is not None
    assert len(raw.spans) == 1024


def test_a_span_may_end_with_the_prompt_but_not_beyond() -> None:
    raw = wire.parse(rag(document(), document(start=4, end=9), unit="char"))
    assert raw is not None
    wire.check_within(raw, 9, "the prompt")
    with pytest.raises(AnnotationError, match="9 is beyond the 8 chars of prompt 2") as error:
        wire.check_within(raw, 8, "prompt 2")
    assert error.value.field == "rag.documents[1].end"


def test_the_normalised_form_reads_back_and_is_well_formed() -> None:
    documents = (DocumentSpan("a", 0, 4, "3"), DocumentSpan("b", 4, 9))
    for counts in (True, False):
        rag = wire.normalised(documents, speculative=True, strict=False, counts=counts)
        custom_params = {"rag": rag}
        assert wire.spans(custom_params) == Annotation(documents, True, None, counts)
        raw = wire.RawAnnotation(documents, speculative=True, counts=counts)
        assert wire.parse(custom_params) == raw


@pytest.mark.parametrize(
    "value",
    ["rag", [], {}, {"documents": [{}]}, rag(document())["rag"], {"documents": 5}],
)
def test_what_came_past_the_door_counts_as_unannotated(value: Any) -> None:
    assert wire.spans({"rag": value}) is None
    char = wire.normalised([DocumentSpan("a", 0, 4)], speculative=False, strict=False)
    assert wire.spans({"rag": {**char, "unit": "char"}}) is None
