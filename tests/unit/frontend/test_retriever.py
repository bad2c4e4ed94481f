from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import faiss
import numpy as np
import pytest
from rag_radix_frontend import FaissRetriever, Retriever, Stage
from rag_radix_frontend.errors import ArgumentError, RetrievalError
from rag_radix_frontend.index import INDEX_NAME
from rag_radix_frontend.retriever import final_documents
from rag_radix_frontend.staged_search import FaissSearch

QUESTIONS = {
    "How do I catch an exception?": {"topics/exceptions", "topics/assert", "topics/except"},
    "What do comparison operators return?": {"topics/comparisons", "topics/bltin-ellipsis-object"},
    "Stop a loop early": {"topics/break", "topics/continue"},
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_documents_are_found_by_meaning_in_every_kind_of_index(
    index_directory: Path, question: str
) -> None:
    found = final_documents(FaissRetriever.open(index_directory), question, 4)
    assert QUESTIONS[question] & {scored.document.id for scored in found}
    scores = [scored.score for scored in found]
    assert scores == sorted(scores, reverse=True)


def test_the_exact_index_agrees_with_a_product_of_matrices(
    minilm_retriever: FaissRetriever,
) -> None:
    question = "How are numbers compared?"
    encoder, documents = minilm_retriever.encoder, list(minilm_retriever.store)
    similarity = encoder.encode([d.text for d in documents]) @ encoder.encode([question])[0]
    found = final_documents(minilm_retriever, question, 5)
    np.testing.assert_allclose(
        [scored.score for scored in found], np.sort(similarity)[::-1][:5], atol=1e-5
    )


def test_a_search_has_one_stage_and_it_is_final(minilm_retriever: FaissRetriever) -> None:
    stages = list(minilm_retriever.retrieve("loops", 3))
    assert [stage.final for stage in stages] == [True]
    assert len(stages[0].documents) == 3
    assert isinstance(minilm_retriever, Retriever)


def test_stages_change_when_documents_come_and_not_which_are_final(index_directory: Path) -> None:
    whole = FaissRetriever.open(index_directory, stages=1)
    staged = FaissRetriever.open(index_directory, stages=(0.1, 0.3, 1))
    for question in QUESTIONS:
        stages = list(staged.retrieve(question, 4))
        assert [stage.final for stage in stages] == [False] * (len(stages) - 1) + [True]
        assert stages[-1].documents == final_documents(whole, question, 4)
    # Forty documents make one cluster, but many hops.
    assert len(stages) == (3 if index_directory.name == "hnsw" else 1)


def test_more_documents_than_there_are_gives_all(minilm_retriever: FaissRetriever) -> None:
    assert len(final_documents(minilm_retriever, "loops", 1000)) == 40


def test_k_below_1_is_refused(minilm_retriever: FaissRetriever) -> None:
    with pytest.raises(ArgumentError, match="0"):
        final_documents(minilm_retriever, "loops", 0)


@pytest.mark.parametrize("kind", ["IVF32,Flat", "HNSW16,Flat"])
def test_each_search_uses_its_own_effort_on_a_shared_index(kind: str) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(2000, 16)).astype(np.float32)
    index = faiss.index_factory(16, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    untouched = (
        getattr(index, "nprobe", None),
        getattr(index, "hnsw", None) and index.hnsw.efSearch,
    )
    narrow = FaissSearch(index, nprobe=1, ef_search=1)
    wide = FaissSearch(index, nprobe=32, ef_search=1000)
    exact = np.argmax(vectors @ vectors.T, axis=1)
    found: dict[str, list[int]] = {"narrow": [], "wide": []}

    def search(name: str, search: FaissSearch) -> None:
        for vector in vectors[:200]:
            (stage,) = search.search(vector, 10)
            found[name].append(int(stage.positions[0]) if len(stage.positions) else -1)

    threads = [
        threading.Thread(target=search, args=("narrow", narrow)),
        threading.Thread(target=search, args=("wide", wide)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["narrow"] == [
        int(stage.positions[0]) for v in vectors[:200] for stage in narrow.search(v, 10)
    ]
    assert np.mean(np.array(found["wide"]) == exact[:200]) > 0.95
    assert untouched == (
        getattr(index, "nprobe", None),
        getattr(index, "hnsw", None) and index.hnsw.efSearch,
    )


def test_threads_share_a_retriever(minilm_retriever: FaissRetriever) -> None:
    questions = ["loops", "exceptions", "numbers", "strings"] * 4
    expected = [final_documents(minilm_retriever, q, 3) for q in questions]
    got: dict[int, object] = {}
    threads = [
        threading.Thread(
            target=lambda i=i: got.update({i: final_documents(minilm_retriever, questions[i], 3)})
        )
        for i in range(len(questions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [[s.document.id for s in found] for found in expected]
    assert [[s.document.id for s in got[i]] for i in range(len(questions))] == ids  # type: ignore[attr-defined]


def test_opening_does_not_load_the_model(index_directory: Path) -> None:
    retriever = FaissRetriever.open(index_directory)
    assert retriever.encoder._model is None  # type: ignore[attr-defined]
    retriever.warm_up()
    assert retriever.encoder._model is not None  # type: ignore[attr-defined]


def test_a_retriever_without_a_final_stage_is_reported() -> None:
    class Endless:
        def retrieve(self, query: str, k: int) -> Iterator[Stage]:
            yield Stage((), final=False)

    with pytest.raises(RetrievalError, match="Endless ended without a final stage"):
        final_documents(Endless(), "q", 1)


def test_the_index_file_is_a_faiss_index_others_can_read(index_directory: Path) -> None:
    assert faiss.read_index(str(index_directory / INDEX_NAME)).ntotal == 40
