"""Search of a Faiss IVF index, batch of clusters by batch of clusters, nearest clusters first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_radix_frontend.encoders import Vectors
from rag_radix_frontend.errors import ArgumentError
from rag_radix_frontend.pace import Pace, Stages
from rag_radix_frontend.staged_search import (
    DEFAULT_NPROBE,
    Candidates,
    check_positive,
    check_query,
    found,
    one_thread,
)


class StagedIVF:
    """The search of `nprobe` clusters, cut into stages.

    The clusters are chosen once, as Faiss chooses them, and each is visited once: the final
    stage is what Faiss's own search finds, up to the order of equal scores. Flat, scalar and
    product quantized storage, inner product and L2.

    `stages` says where to cut (see `Pace`); by default that follows from the time a search
    takes, which `warm_up()` or the first search measures. The index must not change meanwhile.

    Raises:
        ArgumentError: the index can't be searched this way, or an argument makes no sense.
    """

    def __init__(self, index: Any, *, nprobe: int = DEFAULT_NPROBE, stages: Stages = None) -> None:
        if not self.supports(index):
            raise ArgumentError(
                f"{type(index).__name__} can't be searched cluster by cluster; "
                "FaissSearch searches it in one stage"
            )
        check_positive("nprobe", nprobe)
        self._index = index
        self._nprobe = min(nprobe, index.nlist)
        self._pace = Pace(stages, self._search_once)

    @staticmethod
    def supports(index: Any) -> bool:
        """Wrapped indexes (transformed vectors, mapped ids) and fast-scan codes aren't."""
        import faiss

        return type(index) in (
            faiss.IndexIVFFlat,
            faiss.IndexIVFScalarQuantizer,
            faiss.IndexIVFPQ,
        )

    def search(self, vector: Vectors, k: int) -> Iterator[Candidates]:
        check_query(vector, self._index)
        return self._search(vector, k, self._pace.ends(self._nprobe))

    def warm_up(self) -> None:
        """Measure how long a search takes, unless stages were given."""
        self._pace.ends(self._nprobe)

    def _search(self, vector: Vectors, k: int, ends: Sequence[int]) -> Iterator[Candidates]:
        query = np.ascontiguousarray(vector[None, :], dtype=np.float32)
        with one_thread():
            to_centroids, clusters = self._index.quantizer.search(query, self._nprobe)
        best: Candidates | None = None
        for start, end in pairwise((0, *ends)):
            visited = self._visit(query, k, clusters[0, start:end], to_centroids[0, start:end])
            best = visited if best is None else self._merge(best, visited, k)
            yield best._replace(final=end == self._nprobe)

    def _visit(
        self,
        query: Vectors,
        k: int,
        clusters: npt.NDArray[np.int64],
        to_centroids: npt.NDArray[np.float32],
    ) -> Candidates:
        """The best k vectors of some clusters."""
        import faiss

        scores = np.empty(k, dtype=np.float32)
        positions = np.empty(k, dtype=np.int64)
        parameters = faiss.SearchParametersIVF(nprobe=len(clusters))
        # Faiss's Python wrapper of this takes no parameters and insists on the index's nprobe.
        with one_thread():
            self._index.search_preassigned_c(
                1,
                faiss.swig_ptr(query),
                k,
                faiss.swig_ptr(clusters),
                faiss.swig_ptr(to_centroids),
                faiss.swig_ptr(scores),
                faiss.swig_ptr(positions),
                False,
                parameters,
            )
        return found(positions, scores, final=False)

    def _merge(self, best: Candidates, visited: Candidates, k: int) -> Candidates:
        import faiss

        scores = np.concatenate([best.scores, visited.scores])
        positions = np.concatenate([best.positions, visited.positions])
        higher_is_better = self._index.metric_type == faiss.METRIC_INNER_PRODUCT
        order = np.argsort(-scores if higher_is_better else scores, kind="stable")[:k]
        return Candidates(positions[order], scores[order], final=False)

    def _search_once(self) -> None:
        vector = np.random.default_rng(0).standard_normal(self._index.d, dtype=np.float32)
        list(self._search(vector, 1, [self._nprobe]))
