from __future__ import annotations

import pytest
from rag_radix_frontend import Document, annotate
from rag_radix_frontend.errors import ArgumentError

CATS = Document("cats", "Cats purr.\n", version="3")
DOGS = Document("dogs", "Dogs bark.")
MESSAGES = [
    {"role": "system", "content": "Use these."},
    {"role": "user", "content": "Cats purr.\n\nDogs bark.\n\nWhich purr?"},
]


def test_documents_travel_as_text_with_their_identity() -> None:
    assert annotate(MESSAGES, [CATS, DOGS]) == {
        "custom_params": {
            "rag": {
                "documents": [
                    {"id": "cats", "version": "3", "text": "Cats purr."},
                    {"id": "dogs", "text": "Dogs bark."},
                ]
            }
        }
    }


def test_strict_is_sent_on_request() -> None:
    assert annotate(MESSAGES, [CATS], strict=True)["custom_params"]["rag"]["strict"] is True


def test_a_document_that_is_not_in_the_messages_is_named() -> None:
    with pytest.raises(ArgumentError, match="'moon'"):
        annotate(MESSAGES, [CATS, Document("moon", "The moon.")])


def test_a_document_out_of_order_is_named_with_the_one_before_it() -> None:
    with pytest.raises(ArgumentError, match=r"'cats'.*after document 'dogs'"):
        annotate(MESSAGES, [DOGS, CATS])


def test_a_text_quoted_once_cannot_stand_for_two_documents() -> None:
    with pytest.raises(ArgumentError, match="'copy'"):
        annotate(MESSAGES, [DOGS, Document("copy", DOGS.text)])


def test_documents_may_spread_over_messages_and_content_parts() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "Dogs bark."},
    ]
    messages = [
        {"role": "user", "content": "Cats purr."},
        {"role": "assistant", "content": None},
        {"role": "user", "content": parts},
    ]
    found = annotate(messages, [CATS, DOGS])["custom_params"]["rag"]["documents"]
    assert [d["id"] for d in found] == ["cats", "dogs"]


def test_a_document_of_white_space_is_refused() -> None:
    with pytest.raises(ArgumentError, match="'blank'"):
        annotate(MESSAGES, [Document("blank", " \n")])


def test_a_dictionary_is_refused_with_the_remedy() -> None:
    with pytest.raises(ArgumentError, match=r"no Document: give Document\(id"):
        annotate(MESSAGES, [{"id": "cats", "text": "Cats purr."}])  # type: ignore[list-item]


def test_a_salt_covers_what_follows_the_public_documents() -> None:
    extra = annotate(MESSAGES, [CATS, DOGS], cache_salt="secret", salt_from=1)
    assert extra["cache_salt"] == "secret"
    assert extra["custom_params"]["rag"]["salt_from"] == 1
    covers_all = annotate(MESSAGES, [CATS, DOGS], cache_salt="secret")
    assert covers_all["cache_salt"] == "secret"
    assert "salt_from" not in covers_all["custom_params"]["rag"]


def test_what_is_public_of_a_request_without_a_salt_is_no_question() -> None:
    with pytest.raises(ArgumentError, match="needs a cache_salt"):
        annotate(MESSAGES, [CATS], salt_from=1)


@pytest.mark.parametrize("salt_from", [-1, 3])
def test_a_salt_begins_at_one_of_the_documents(salt_from: int) -> None:
    with pytest.raises(
        ArgumentError, match=f"from 0 to 2, the number of documents, not {salt_from}"
    ):
        annotate(MESSAGES, [CATS, DOGS], cache_salt="secret", salt_from=salt_from)
