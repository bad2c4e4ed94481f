"""Which order of documents the tree has most of, asked as `POST /rag/order` asks."""

from __future__ import annotations

import json

import pytest
from tree_harness import harness
from unit.tree.prompts import SYSTEM, document, prompt

from rag_radix.document_order import answer, parse


def ask(h, *names, system=SYSTEM, extra_key=None, cache_salt=None, shared_tokens=0):
    question = {
        "prefix": list(system),
        "documents": [document(name) for name in names],
        "extra_key": extra_key,
        "cache_salt": cache_salt,
        "shared_tokens": shared_tokens,
    }
    reply = answer(h.tree, question)
    return [names[index] for index in reply["order"]], reply["cached_tokens"]


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_cached_comes_first_and_nothing_changes(page_size):
    with harness(device_tokens=2_000, page_size=page_size) as h:
        h.serve(*prompt("b", "a"))
        before = [(n.id, len(n.key), n.last_access_time) for n in h.nodes()]
        order, tokens = ask(h, "a", "b", "c")
        assert order == ["b", "a", "c"]
        assert tokens == (20 + 2 * 40) // page_size * page_size
        assert [(n.id, len(n.key), n.last_access_time) for n in h.nodes()] == before


def test_host_copies_count():
    with harness(device_tokens=300, host_tokens=1_000) as h:
        h.serve(*prompt("b", "a"))
        for n in range(6):
            h.serve(*prompt(f"x{n}", f"y{n}"))
        order, tokens = ask(h, "a", "b")
        assert order == ["b", "a"]
        assert tokens >= 20 + 40


def test_another_namespace_or_prefix_has_nothing():
    with harness(device_tokens=2_000) as h:
        h.serve(*prompt("b", "a"))
        assert ask(h, "a", "b", extra_key="tenant") == (["a", "b"], 0)
        assert ask(h, "a", "b", system=[7, 8]) == (["a", "b"], 0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_tenants_documents_are_looked_up_behind_what_is_public(page_size):
    with harness(device_tokens=2_000, page_size=page_size) as h:
        h.serve(*prompt("public", "b", "a"), cache_salt="one", salt_from=1)
        before = [*SYSTEM, *document("public")]
        cached = (20 + 3 * 40) // page_size * page_size
        salted = {"system": before, "shared_tokens": len(before), "cache_salt": "one"}
        assert ask(h, "a", "b", **salted) == (["b", "a"], cached)
        other = ask(h, "a", "b", **{**salted, "cache_salt": "two"})
        assert other == (["a", "b"], len(before) // page_size * page_size)
        assert ask(h, "a", "b", **{**salted, "shared_tokens": 0}) == (["a", "b"], 0)
        h.tree.enable_storage = True  # Salts cover whole prompts there.
        assert ask(h, "a", "b", **salted) == (["a", "b"], 0)
        h.tree.enable_storage = False


class WordTokenizer:
    """A token a word; as much of a tokenizer as is used."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1000 + int(word, 36) for word in text.split()]


def test_texts_are_tokenized_apart():
    body = {"text": "you are ", "documents": ["a b\n", "c "], "cache_salt": "t"}
    assert parse(json.dumps(body).encode(), WordTokenizer(), 5) == {
        "prefix": [1000 + int(word, 36) for word in ("you", "are")],
        "documents": [[1010, 1011], [1012]],
        "extra_key": None,
        "cache_salt": "t",
        "shared_tokens": 0,
    }


@pytest.mark.parametrize(("salt_from", "shared_tokens"), [(None, 0), (0, 1), (1, 3), (2, 4)])
def test_a_text_has_documents_and_a_salt_as_in_its_request(salt_from, shared_tokens):
    documents = [{"id": "0", "start": 4, "end": 10}, {"id": "1", "start": 10, "end": 12}]
    rag = {"documents": documents, "unit": "char", "salt_from": salt_from}
    body = {"text": "you are none so ", "documents": ["a b"], "rag": rag, "cache_salt": "t"}
    words = ["you", "are", "no", "ne", "so"]  # "none" is two: a document ends within it.
    assert parse(json.dumps(body).encode(), WordTokenizer(), 9) == {
        "prefix": [1000 + int(word, 36) for word in words],
        "documents": [[1010, 1011]],
        "extra_key": None,
        "cache_salt": "t",
        "shared_tokens": shared_tokens,
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "isn't JSON"),
        (b"[]", "must be an object"),
        (b'{"text": "a"}', "must be an object"),
        (b'{"text": "a", "documents": [], "k": 1}', "must be an object"),
        (b'{"text": 1, "documents": []}', "text must be a string"),
        (b'{"text": "a", "documents": "b"}', "documents must be an array"),
        (b'{"text": "a", "documents": [""]}', "none of them empty"),
        (b'{"text": "a", "documents": [1]}', "must be strings"),
        (b'{"text": "a", "documents": ["b"], "extra_key": 3}', "extra_key must be a string"),
        (b'{"text": "a", "documents": [], "rag": 1}', "rag must be an object"),
        (b'{"text": "a", "documents": [], "rag": {}}', "rag.documents: is missing"),
        (
            b'{"text": "a", "documents": [], "rag": {"documents": [{"id": "a", "text": "a"}]}}',
            'start, end and unit "char"',
        ),
        (
            b'{"text": "a", "documents": [], "rag": {"documents": [], "salt_from": 0}}',
            "salt_from needs a cache_salt",
        ),
        (
            b'{"text": "a", "documents": [], "rag": {"unit": "char", "documents": '
            b'[{"id": "a", "start": 0, "end": 2}]}}',
            "beyond the 1 chars of the text",
        ),
        (json.dumps({"text": "", "documents": ["a"] * 65}).encode(), "at most 64"),
        (json.dumps({"text": "a " * 63, "documents": ["a ", "b"]}).encode(), "65 tokens, more"),
    ],
)
def test_malformed_bodies_are_named(body, said):
    with pytest.raises(ValueError, match=said):
        parse(body, WordTokenizer(), 64)


def test_without_a_tokenizer_there_is_no_order():
    with pytest.raises(ValueError, match="tokenizer"):
        parse(b'{"text": "a", "documents": ["b"]}', None, 64)
