"""The demo's documents: sizes, ids, and that no two say the same."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
corpus = importlib.import_module("demo_corpus")

# Close to what the model's tokenizer counts for this text, and needs no model.
CHARACTERS_PER_TOKEN = 3.7


def count_tokens(text: str) -> int:
    return round(len(text) / CHARACTERS_PER_TOKEN)


@pytest.fixture(scope="module")
def documents() -> list[dict[str, str]]:
    from pydoc_data.topics import topics

    made = corpus.make_documents(topics, count_tokens)
    return [{"id": document.id, "text": document.text} for document in made]


def test_ids_are_unique_and_number_the_passages_of_a_topic(documents: list[dict[str, str]]) -> None:
    ids = [document["id"] for document in documents]
    assert len(set(ids)) == len(ids)
    assert "topics/assert#0" in ids
    for topic, count in Counter(one.split("#")[0] for one in ids).items():
        assert {f"{topic}#{number}" for number in range(count)} <= set(ids)


def test_passages_have_200_to_600_tokens_unless_the_topic_is_shorter(
    documents: list[dict[str, str]],
) -> None:
    passages = Counter(document["id"].split("#")[0] for document in documents)
    for document in documents:
        tokens = count_tokens(document["text"])
        assert tokens <= corpus.LONGEST_TOKENS, document["id"]
        if passages[document["id"].split("#")[0]] > 1:
            assert tokens >= corpus.SHORTEST_TOKENS, document["id"]


def test_a_paragraph_is_in_the_shortest_topic_that_has_it_only() -> None:
    shared = "The same paragraph in both."
    made = list(
        corpus.make_documents(
            {"long": f"Long\n****\n\n{shared}\n\nAnd more.", "short": f"Short\n*****\n\n{shared}"},
            count_tokens,
        )
    )
    assert [document.id for document in made] == ["topics/short#0", "topics/long#0"]
    assert shared in made[0].text
    assert shared not in made[1].text


def test_every_passage_begins_with_its_topics_title(documents: list[dict[str, str]]) -> None:
    titles: dict[str, str] = {}
    for document in documents:
        topic, title = document["id"].split("#")[0], document["text"].split("\n")[0]
        assert titles.setdefault(topic, title) == title


def test_a_paragraph_longer_than_a_document_is_cut_between_lines() -> None:
    table = "\n".join(f"row {number} of a long table" for number in range(400))
    runs = list(corpus.chunk_paragraphs([table], count_tokens))
    assert "\n".join(piece for run in runs for piece in run) == table
    assert all(count_tokens("\n\n".join(run)) <= corpus.LONGEST_TOKENS for run in runs)
    assert len(runs) > 3


def test_the_corpus_file_has_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    count = corpus.write_corpus(path, count_tokens)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == count
    assert all(set(json.loads(line)) == {"id", "text"} for line in lines)
