"""Staged search: a search over vectors that may say early what it will probably find.

A stage is a provisional top-k list; the last one is final. Faiss's own searches know nothing
before they end, so they have one stage, the final one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rag_radix_frontend.encoders import Vectors

DEFAULT_NPROBE = 16
DEFAULT_EF_SEARCH = 64


class Candidates(NamedTuple):
    """The best documents known at one stage, best first.

    `positions` is int64 [m] and `scores` float32 [m] with m <= k.
    """

    positions: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    final: bool


class StagedSearch(Protocol):
    """A search over vectors. Safe to share between threads."""

    def search(self, vector: Vectors, k: int) -> Iterator[Candidates]:
        """Stages for a query of shape [d]; the last one, and no other, is final."""
        ...


class FaissSearch:
    """Search of a Faiss index in one stage.

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
        self._index = index
        self._nprobe = nprobe
        self._ef_search = ef_search

    def search(self, vector: Vectors, k: int) -> Iterator[Candidates]:
        scores, positions = self._index.search(vector[None, :], k, params=self._parameters(k))
        # Faiss fills up with -1 where it visited fewer than k vectors.
        found = positions[0] >= 0
        yield Candidates(positions[0][found], scores[0][found], final=True)

    def _parameters(self, k: int) -> Any:
        import faiss

        if isinstance(self._index, faiss.IndexIVF):
            return faiss.SearchParametersIVF(nprobe=self._nprobe)
        if isinstance(self._index, faiss.IndexHNSW):
            return faiss.SearchParametersHNSW(efSearch=max(self._ef_search, k))
        return None
