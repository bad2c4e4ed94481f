"""LangChain's and LlamaIndex's retrievers as ours, and any function, as of a remote service.

Nothing here imports those packages: what their retrievers return is read by its attributes.
Their searches say nothing before they end, so they have one stage, the final one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from rag_radix_frontend.document import Document
from rag_radix_frontend.errors import ArgumentError, RetrievalError
from rag_radix_frontend.retriever import ScoredDocument, Stage


class LangChainRetriever:
    """A LangChain retriever: any object whose `invoke(query)` returns its documents, best first.

    How many it returns is its own setting (as `search_kwargs={"k": 5}`); of more than the k that
    is asked for, the first k are taken. LangChain gives an order and no scores, so a document's
    score is 1 over its rank. A document without `id` is named by a digest of its text. As safe
    to share between threads as the retriever.

    Raises:
        ArgumentError: the object has no `invoke`.
    """

    def __init__(self, retriever: Any) -> None:
        _check_has(retriever, "invoke")
        self._retriever = retriever

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        yield Stage(_ranked(map(_of_langchain, self._retriever.invoke(query)), k), final=True)


class LlamaIndexRetriever:
    """A LlamaIndex retriever: any object whose `retrieve(query)` returns nodes with scores.

    How many it returns is its own setting (`similarity_top_k`); of more than the k that is asked
    for, the first k are taken. The text of a document is the node's, without metadata. A node
    without a score gets 1 over its rank. As safe to share between threads as the retriever.

    Raises:
        ArgumentError: the object has no `retrieve`.
    """

    def __init__(self, retriever: Any) -> None:
        _check_has(retriever, "retrieve")
        self._retriever = retriever

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        yield Stage(_ranked(map(_of_llama_index, self._retriever.retrieve(query)), k), final=True)


class CallableRetriever:
    """A retriever out of a function of query and k, such as a call of a remote service.

    It returns documents, best first, with or without scores (without, 1 over the rank), or
    yields `Stage`s of its own, the last one final: a service that sends what it has found so
    far makes speculation possible. More than k documents are cut. It must be safe to call from
    several threads at once.

    Raises (while retrieving):
        RetrievalError: what the function yields is neither; its stages end without a final one.
    """

    def __init__(
        self, function: Callable[[str, int], Iterable[Stage | ScoredDocument | Document]]
    ) -> None:
        self._function = function

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        items = iter(self._function(query, k))
        first = next(items, None)
        if not isinstance(first, Stage):
            found = () if first is None else chain((first,), items)
            yield Stage(_ranked(map(self._scored, found), k), final=True)
            return
        stage = first
        while not stage.final:
            yield Stage(_ranked(map(self._scored, stage.documents), k), final=False)
            following = next(items, None)
            if not isinstance(following, Stage):
                raise RetrievalError(
                    f"{self._name} must go on with a Stage until one is final, not end with "
                    f"{following!r}"
                )
            stage = following
        yield Stage(_ranked(map(self._scored, stage.documents), k), final=True)

    def _scored(self, item: Any) -> tuple[Document, float | None]:
        if isinstance(item, Document):
            return item, None
        if isinstance(item, ScoredDocument):
            return item
        raise RetrievalError(
            f"{self._name} must give Document, ScoredDocument or Stage objects, not {item!r}"
        )

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))


def _of_langchain(found: Any) -> tuple[Document, float | None]:
    name = getattr(found, "id", None) or _digest(found.page_content)
    return Document(str(name), found.page_content, metadata=found.metadata), None


def _of_llama_index(found: Any) -> tuple[Document, float | None]:
    node = found.node
    return Document(node.node_id, node.get_content(), metadata=node.metadata), found.score


def _ranked(found: Iterable[tuple[Document, float | None]], k: int) -> tuple[ScoredDocument, ...]:
    return tuple(
        ScoredDocument(document, 1 / rank if score is None else float(score))
        for rank, (document, score) in zip(range(1, k + 1), found, strict=False)
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _check_has(retriever: Any, method: str) -> None:
    if not callable(getattr(retriever, method, None)):
        raise ArgumentError(f"{type(retriever).__name__} has no method {method}()")
