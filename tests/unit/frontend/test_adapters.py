"""LangChain and LlamaIndex themselves are tested where they are installed; their shapes always."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rag_radix_frontend import Document, Retriever, ScoredDocument, Stage
from rag_radix_frontend.adapters import CallableRetriever, LangChainRetriever, LlamaIndexRetriever
from rag_radix_frontend.errors import ArgumentError, RetrievalError
from rag_radix_frontend.retriever import final_documents

CATS, DOGS, COWS = Document("cats", "Purr."), Document("dogs", "Bark."), Document("cows", "Moo.")


def langchain_document(text: str, **fields: Any) -> Any:
    return SimpleNamespace(page_content=text, **{"metadata": {}, "id": None, **fields})


def llama_index_node(name: str, text: str, score: float | None) -> Any:
    node = SimpleNamespace(node_id=name, get_content=lambda: text, metadata={"file": "f"})
    return SimpleNamespace(node=node, score=score)


def test_langchain_documents_keep_order_name_and_metadata() -> None:
    found = [langchain_document("Purr.", id="cats", metadata={"page": 3}), langchain_document("b")]
    asked: list[str] = []
    retriever = LangChainRetriever(
        SimpleNamespace(invoke=lambda query: (asked.append(query), found)[1])
    )
    assert isinstance(retriever, Retriever)
    (stage,) = retriever.retrieve("what purrs?", 5)
    assert asked == ["what purrs?"]
    assert stage.final
    assert [scored.score for scored in stage.documents] == [1.0, 0.5]
    first, second = (scored.document for scored in stage.documents)
    assert (first.id, first.text, first.metadata) == ("cats", "Purr.", {"page": 3})
    assert second.text == "b"


def test_langchain_documents_without_a_name_are_named_by_their_text() -> None:
    found = [langchain_document("a"), langchain_document("b"), langchain_document("a")]
    retriever = LangChainRetriever(SimpleNamespace(invoke=lambda query: found))
    a, b, same = (scored.document.id for scored in final_documents(retriever, "q", 3))
    assert a == same != b


def test_llama_index_nodes_keep_name_text_and_score() -> None:
    found = [llama_index_node("n1", "Purr.", 0.9), llama_index_node("n2", "Bark.", None)]
    retriever = LlamaIndexRetriever(SimpleNamespace(retrieve=lambda query: found))
    assert isinstance(retriever, Retriever)
    (stage,) = retriever.retrieve("q", 2)
    assert stage.final
    assert [(s.document.id, s.document.text, s.score) for s in stage.documents] == [
        ("n1", "Purr.", 0.9),
        ("n2", "Bark.", 0.5),
    ]


def test_more_than_k_documents_are_cut() -> None:
    for retriever in (
        LangChainRetriever(
            SimpleNamespace(invoke=lambda q: [langchain_document(c) for c in "abc"])
        ),
        LlamaIndexRetriever(
            SimpleNamespace(retrieve=lambda q: [llama_index_node(c, c, 1.0) for c in "abc"])
        ),
        CallableRetriever(lambda query, k: [CATS, DOGS, COWS]),
        CallableRetriever(
            lambda query, k: [Stage(tuple(ScoredDocument(d, 1) for d in (CATS, DOGS, COWS)), True)]
        ),
    ):
        assert len(final_documents(retriever, "q", 2)) == 2


def test_no_more_than_k_documents_are_asked_of_a_function() -> None:
    def endless(query: str, k: int) -> Iterator[Document]:
        for place in range(10):
            yield Document(str(place), "text")
        raise AssertionError("it would go on for ever")

    assert len(final_documents(CallableRetriever(endless), "q", 3)) == 3


def test_objects_of_another_kind_are_refused_at_once() -> None:
    with pytest.raises(ArgumentError, match=r"dict has no method invoke"):
        LangChainRetriever({})
    with pytest.raises(ArgumentError, match=r"str has no method retrieve"):
        LlamaIndexRetriever("index")


def test_a_function_may_return_documents_with_or_without_scores() -> None:
    asked: list[tuple[str, int]] = []

    def search(query: str, k: int) -> list[Document | ScoredDocument]:
        asked.append((query, k))
        return [ScoredDocument(CATS, 7.5), DOGS]

    (stage,) = CallableRetriever(search).retrieve("q", 3)
    assert asked == [("q", 3)]
    assert stage == Stage((ScoredDocument(CATS, 7.5), ScoredDocument(DOGS, 0.5)), final=True)


def test_a_function_that_finds_nothing_gives_an_empty_final_stage() -> None:
    assert list(CallableRetriever(lambda query, k: []).retrieve("q", 3)) == [Stage((), True)]


def test_a_service_may_yield_stages_of_its_own_as_they_come() -> None:
    sent: list[str] = []

    def search(query: str, k: int) -> Iterator[Stage]:
        sent.append("first")
        yield Stage((ScoredDocument(CATS, 1.0),), final=False)
        sent.append("last")
        yield Stage((ScoredDocument(DOGS, 2.0), ScoredDocument(CATS, 1.0)), final=True)
        sent.append("too many")

    stages = CallableRetriever(search).retrieve("q", 3)
    assert not next(stages).final
    assert sent == ["first"]
    assert [scored.document for scored in next(stages).documents] == [DOGS, CATS]
    assert next(stages, None) is None
    assert sent == ["first", "last"]


@pytest.mark.parametrize(
    ("items", "named"),
    [
        (["text"], "search must give .* not 'text'"),
        ([CATS, Stage((), True)], "must give Document, ScoredDocument or Stage objects, not Stage"),
        ([Stage((), False)], "until one is final, not end with None"),
        ([Stage((), False), CATS], "until one is final"),
    ],
)
def test_a_function_that_breaks_its_contract_is_named(items: list[Any], named: str) -> None:
    def search(query: str, k: int) -> list[Any]:
        return items

    with pytest.raises(RetrievalError, match=named):
        list(CallableRetriever(search).retrieve("q", 3))


def test_an_exception_of_the_function_is_the_caller_s() -> None:
    def search(query: str, k: int) -> list[Document]:
        raise TimeoutError("no answer")

    with pytest.raises(TimeoutError, match="no answer"):
        list(CallableRetriever(search).retrieve("q", 3))


def test_a_langchain_vector_store_is_a_retriever() -> None:
    documents = pytest.importorskip("langchain_core.documents")
    embeddings = pytest.importorskip("langchain_core.embeddings")
    stores = pytest.importorskip("langchain_core.vectorstores")
    store = stores.InMemoryVectorStore(embeddings.DeterministicFakeEmbedding(size=16))
    store.add_documents(
        [documents.Document(id=f"d{i}", page_content=f"text {i}") for i in range(10)]
    )
    retriever = LangChainRetriever(store.as_retriever(search_kwargs={"k": 5}))
    found = final_documents(retriever, "text 3", 4)
    assert (found[0].document.id, found[0].document.text) == ("d3", "text 3")
    assert len(found) == 4


def test_a_llama_index_index_is_a_retriever() -> None:
    core = pytest.importorskip("llama_index.core")
    schema = pytest.importorskip("llama_index.core.schema")
    nodes = [schema.TextNode(id_=f"n{i}", text=f"node {i}") for i in range(6)]
    index = core.VectorStoreIndex(nodes, embed_model=core.MockEmbedding(embed_dim=8))
    retriever = LlamaIndexRetriever(index.as_retriever(similarity_top_k=4))
    found = final_documents(retriever, "node", 3)
    assert len(found) == 3
    assert all(f.document.text == f"node {f.document.id[1:]}" for f in found)
