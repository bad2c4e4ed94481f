"""Questions over real documents, as a load."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from e2e.exactness import MODEL
from rag_radix_benchmarks import corpus
from rag_radix_benchmarks.corpus import INSTRUCTION, CorpusPrograms, CorpusQuestions, question_text
from rag_radix_benchmarks.piecewise_endpoint import PiecewiseEndpoint
from rag_radix_frontend import FaissRetriever, build_index
from rag_radix_frontend.connections import Connections
from rag_radix_frontend.retriever import final_documents
from rag_radix_frontend.template import DEFAULT_TEMPLATE, compile_template
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from rag_radix.errors import ConfigError

TEXTS = {
    "tea": "Tea\n\nPour hot water over the leaves and wait for three minutes.",
    "bread": "Bread\n\nKnead flour, water and salt, and bake the dough.",
    "soup": "Soup\n\nBoil vegetables in water with salt.",
}

ANSWERED = SimpleNamespace(status_code=200, json=lambda: {"text": "", "meta_info": {}})


class State:
    """What a request is sent for."""

    def __init__(self, text):
        self.text_ = text


class LetterEncoder:
    """Counts letters."""

    name = "letters"
    dimensions = 26

    def encode(self, texts):
        counts = [[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts]
        vectors = np.array(counts, dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "source.jsonl"
    source.write_text(
        "".join(json.dumps({"id": id, "text": text}) + "\n" for id, text in TEXTS.items())
    )
    build_index(source, tmp_path / "index", LetterEncoder())
    opened = FaissRetriever.open(tmp_path / "index", encoder=LetterEncoder())
    monkeypatch.setattr(corpus, "_retriever", lambda index, stages=None: opened)
    corpus._questions.cache_clear()
    corpus._waited.cache_clear()
    return tmp_path / "index"


def programs(index: Path, search_s: float) -> CorpusPrograms:
    settings = {"model_path": str(MODEL), "k": 2, "skew": 1.0, "output_tokens": 3}
    settings |= {"warm_up": 4, "requests": 30, "seed": 1}
    return CorpusPrograms.open(index, None, search_s=search_s, **settings)


def questions(index: Path, path: Path | None = None, **different: object) -> CorpusQuestions:
    settings = {"model_path": str(MODEL), "k": 2, "skew": 1.0, "output_tokens": 3}
    settings |= {"warm_up": 4, "requests": 30, "seed": 1}
    return CorpusQuestions.open(index, path, **{**settings, **different})


def test_documents_stand_where_the_request_says_with_the_same_tokens_everywhere(index):
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(MODEL).decode
    part = questions(index).part(0)
    requests = part.warm_up + part.measured
    assert (len(part.warm_up), len(part.measured), len(part.prompts)) == (4, 30, 34)
    tokens_of = {}
    for request, ids in zip(requests, part.prompts, strict=True):
        assert request.prompt_tokens == len(ids)
        assert decode(ids).startswith(INSTRUCTION)
        assert len(request.documents) == 2
        for place in request.documents:
            tokens = ids[place.start : place.end]
            assert decode(tokens) == TEXTS[place.id] + "\n\n"
            assert tokens_of.setdefault(place.id, tokens) == tokens
        assert request.documents[-1].end < len(ids)


def test_by_default_the_first_line_of_each_document_is_asked_with_its_number(index):
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(MODEL).decode
    part = questions(index, k=1).part(0)
    asked = [
        decode(ids[request.documents[-1].end :])
        for request, ids in zip(part.warm_up + part.measured, part.prompts, strict=True)
    ]
    assert all(text.startswith(f"Question {number}: ") for number, text in enumerate(asked))
    lines = {text.partition(": ")[2].partition("\n")[0] for text in asked}
    assert lines == {"Tea", "Bread", "Soup"}


def test_repeats_differ_and_each_is_the_same_every_time(index):
    asked = questions(index)
    assert asked.part(0) == asked.part(0)
    assert asked.part(0) != asked.part(1)


def test_questions_may_come_from_a_file_and_decide_the_digest(index, tmp_path):
    path = tmp_path / "questions.txt"
    path.write_text("How long must the leaves wait?\n\n")
    own, default = questions(index, path), questions(index)
    assert own.digest != default.digest
    assert {request.documents for request in own.part(0).measured} != set()
    assert len({request.documents[0].id for request in own.part(0).measured}) == 1


def test_a_file_without_questions_is_refused(index, tmp_path):
    path = tmp_path / "questions.txt"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no questions"):
        questions(index, path)
    with pytest.raises(ConfigError, match="can't be read"):
        questions(index, tmp_path / "missing.txt")


def test_programs_ask_what_prompts_ask(index):
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(MODEL).decode
    part = programs(index, 0.0).part(1)
    prompts = questions(index).part(1)
    assert (part.measured, part.prompts) == (prompts.measured, prompts.prompts)
    for (number, text), ids in zip(part.questions, part.prompts, strict=True):
        assert decode(ids).endswith(question_text(number, text))


def test_a_search_that_is_waited_for_takes_so_long_and_finds_the_same(index):
    workload = programs(index, 0.05)
    (stage,) = workload.retriever(["Bread"]).retrieve("Bread", 2)
    started = time.perf_counter()
    (again,) = workload.retriever(["Bread"]).retrieve("Bread", 2)
    assert time.perf_counter() - started >= 0.05
    (searched,) = programs(index, 0.0).retriever(["Bread"]).retrieve("Bread", 2)
    assert stage == again == searched


def test_a_server_without_the_tree_is_sent_the_tokens_that_one_with_it_makes(index, monkeypatch):
    workload, sent = programs(index, 0.0), []
    monkeypatch.setattr(RuntimeEndpoint, "__init__", lambda self, *arguments: None)
    monkeypatch.setattr(
        Connections, "request", lambda self, route, data, **options: sent.append(data) or ANSWERED
    )
    part = workload.part(0)
    (number, query), ids = part.questions[0], part.prompts[0]
    documents = [document for document, _ in final_documents(workload.retriever([]), query, 2)]
    text, placed = INSTRUCTION, []
    for document in documents:
        start = len(text)
        text += compile_template(DEFAULT_TEMPLATE)(document)
        placed.append({"id": document.id, "start": start, "end": len(text)})
    text += question_text(number, query)
    custom = {"rag": {"documents": placed, "unit": "char"}}
    asked = {"text": text, "sampling_params": {"n": 1, "custom_params": custom}, "rid": "1"}
    endpoint = PiecewiseEndpoint("http://h", workload.tokenizer)
    endpoint._connections.request("/generate", asked)
    assert sent == [{"input_ids": list(ids), "sampling_params": {"n": 1}, "rid": "1"}]
    # Requests of programs go the same way.
    state = State("no document")
    endpoint._sender.whole(state, {"text": state.text_, "sampling_params": {}})
    assert sent[-1]["input_ids"] == workload.tokenizer.encode(state.text_)
    assert "text" not in sent[-1]
