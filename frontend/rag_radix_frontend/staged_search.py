"""Staged search: a search over vectors that may say early what it will probably find.

A stage is a provisional top-k list; the last one is final. Faiss's own searches know nothing
before they end, so they have one stage, the final one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rag_radix_frontend.encoders import Vectors
from rag_radix_frontend.errors import ArgumentError

DEFAULT_NPROBE = 16
DEFAULT_EF_SEARCH = 64


class Candidates(NamedTuple):
    """The best documents known at one stage, best first.

    `positions` is int64 [m] and `scores` float32 [m] with m <= k. A score is what Faiss gives
    for the metric of the index: the inner product, or the squared distance of an L2 index.
    """

    positions: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    final: bool


class StagedSearch(Protocol):
    """A search over vectors. Safe to share between threads."""

    def search(self, vector: Vectors, k: int) -> Iterator[Candidates]:
        """Stages for a query of shape [d]; the last one, and no other, is final.

        Consecutive stages may hold the same candidates. A consumer may stop at any stage.
        """
        ...

    def warm_up(self) -> None:
        """Do now what the first search would otherwise wait for."""
        ...


class FaissSearch:
    """Search of any Faiss index in one stage, by the thread that asks.

    `nprobe` (IVF: clusters visited) and `ef_search` (HNSW: candidates kept) travel with each
    call. Setting them on the index, which threads share, would change the searches of others.
    """

    def __init__(
        self,
        index: Any,
        *,
        nprobe: int = DEFAULT_NPROBE,
        ef_search: int = DEFAULT_EF_SEARCH,
    ) -> None:
        check_positive("nprobe", nprobe)
        check_positive("ef_search", ef_search)
        self._index = index
        self._nprobe = nprobe
        self._ef_search = ef_search

    def search(self, vector: Vectors, k: int) -> Iterator[Candidates]:
        check_query(vector, self._index)
        with one_thread():
            scores, positions = self._index.search(vector[None, :], k, params=self._parameters(k))
        yield found(positions[0], scores[0], final=True)

    def warm_up(self) -> None:
        """Nothing to prepare."""

    def _parameters(self, k: int) -> Any:
        import faiss

        inner = self._index
        while isinstance(inner, faiss.IndexPreTransform | faiss.IndexIDMap):
            inner = faiss.downcast_index(inner.index)
        if isinstance(inner, faiss.IndexIVF):
            return faiss.SearchParametersIVF(nprobe=self._nprobe)
        if isinstance(inner, faiss.IndexHNSW):
            return faiss.SearchParametersHNSW(efSearch=max(self._ef_search, k))
        return None


def found(
    positions: npt.NDArray[np.int64], scores: npt.NDArray[np.float32], *, final: bool
) -> Candidates:
    """What Faiss wrote, without the -1 it fills up with where it saw fewer than k vectors."""
    is_vector = positions >= 0
    return Candidates(positions[is_vector], scores[is_vector], final)


@contextmanager
def one_thread() -> Iterator[None]:
    """Faiss starts no threads for what the calling thread asks inside.

    OpenMP gives every thread that calls it a pool of its own and keeps it: a hundred questions
    at once would be a hundred times as many threads as cores. The setting is the calling
    thread's alone.
    """
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def check_query(vector: Vectors, index: Any) -> None:
    """Raises ArgumentError for a query that isn't one vector of the width of a Faiss index."""
    if vector.shape != (index.d,):
        raise ArgumentError(
            f"a query of this index has shape ({index.d},), not {vector.shape}; was it encoded by "
            "the encoder that built the index?"
        )


def check_positive(name: str, value: int) -> None:
    """Raises ArgumentError for a value below 1."""
    if value < 1:
        raise ArgumentError(f"{name} must be at least 1, not {value}")
