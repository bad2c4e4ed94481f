"""Retrievers: a question in, stages of documents out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, Self, runtime_checkable

from rag_radix_frontend.document import Document
from rag_radix_frontend.encoders import Encoder, load_encoder
from rag_radix_frontend.errors import ArgumentError, DamagedIndexError, EncoderError, RetrievalError
from rag_radix_frontend.index import open_search, read_index
from rag_radix_frontend.manifest import read_manifest
from rag_radix_frontend.pace import Stages
from rag_radix_frontend.staged_search import (
    DEFAULT_EF_SEARCH,
    DEFAULT_NPROBE,
    StagedSearch,
)
from rag_radix_frontend.store import DocumentStore


class ScoredDocument(NamedTuple):
    """A document and how well it fits the question; higher is better."""

    document: Document
    score: float


class Stage(NamedTuple):
    """The best documents known so far, best first; of the last stage, the result."""

    documents: tuple[ScoredDocument, ...]
    final: bool


@runtime_checkable
class Retriever(Protocol):
    """What `rag_retrieve()` asks. Shared by the threads of a batch, so it must be thread safe."""

    def retrieve(self, query: str, k: int) -> Iterable[Stage]:
        """Stages of at most k documents; the last one, and no other, is final."""
        ...


def final_documents(retriever: Retriever, query: str, k: int) -> tuple[ScoredDocument, ...]:
    """Run a retrieval to its end and return its result.

    Raises:
        RetrievalError: the retriever stopped without a final stage.
    """
    for stage in retriever.retrieve(query, k):
        if stage.final:
            return stage.documents
    raise RetrievalError(f"{type(retriever).__name__} ended without a final stage")


class FaissRetriever:
    """Documents of an index directory, found by the similarity of embeddings.

    Safe to share between threads. Opening doesn't load the encoder's model; the first
    question does, or `warm_up()`.
    """

    def __init__(self, store: DocumentStore, search: StagedSearch, encoder: Encoder) -> None:
        self.store = store
        self.encoder = encoder
        self._search = search

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        encoder: Encoder | None = None,
        nprobe: int = DEFAULT_NPROBE,
        ef_search: int = DEFAULT_EF_SEARCH,
        stages: Stages = None,
    ) -> Self:
        """Open what `build_index` wrote.

        Without `encoder`, the one that the index names is used; an index built with an
        encoder of your own needs that one here.

        `nprobe` is how many clusters of an `ivf` index a search visits, `ef_search` how many
        candidates it keeps in an `hnsw` one, and `stages` where it is cut: into so many equal
        parts, or at fractions such as (0.1, 0.5, 1); by default into as many as its measured
        time is worth. A search of a `flat` index has one stage.

        Raises:
            ArgumentError: `nprobe`, `ef_search` or `stages` makes no sense.
            DamagedIndexError: says what is wrong with the directory.
            EncoderError: the encoder is unknown, not installed, or not the index's.
        """
        directory = Path(directory)
        manifest = read_manifest(directory)
        if encoder is None:
            encoder = load_encoder(manifest.encoder)
        elif encoder.name != manifest.encoder:
            raise EncoderError(
                f"{directory} was built with encoder {manifest.encoder!r}, not "
                f"{encoder.name!r}; use that one or build the index again"
            )
        elif encoder.dimensions != manifest.dimensions:
            raise EncoderError(
                f"encoder {encoder.name!r} has {encoder.dimensions} dimensions, {directory} "
                f"was built with {manifest.dimensions}"
            )
        store = DocumentStore(directory)
        if len(store) != manifest.documents:
            raise DamagedIndexError(
                f"{directory} holds {len(store)} documents, its manifest says {manifest.documents}"
            )
        search = open_search(
            read_index(directory, manifest), nprobe=nprobe, ef_search=ef_search, stages=stages
        )
        return cls(store, search, encoder)

    def warm_up(self) -> None:
        """Load the encoder's model and time the search now instead of at the first question."""
        self.encoder.encode(["warm up"])
        self._search.warm_up()

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        if k < 1:
            raise ArgumentError(f"k must be at least 1, not {k}")
        document = cache(self.store.__getitem__)  # most documents are in several stages
        for stage in self._search.search(self.encoder.encode([query])[0], k):
            yield Stage(
                documents=tuple(
                    ScoredDocument(document(int(position)), float(score))
                    for position, score in zip(stage.positions, stage.scores, strict=True)
                ),
                final=stage.final,
            )
