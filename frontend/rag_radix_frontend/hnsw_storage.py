"""The vectors of a Faiss HNSW index, in place, and questions in the form that suits them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rag_radix_frontend.encoders import Vectors
from rag_radix_frontend.hnsw_arrays import BYTES, FLOATS, HALVES, SUBVECTORS, Query, Storage

_CODES_OF_A_BYTE = 256


class StoredVectors:
    """Reads the arrays of `index`, which must outlive it, without copying them."""

    def __init__(self, index: Any) -> None:
        import faiss

        self._inner_product = index.metric_type == faiss.METRIC_INNER_PRODUCT
        self._stored = faiss.downcast_index(index.storage)
        # Of a scalar quantizer, a value is low + code × step; None where values are themselves.
        self._low: Vectors | None = None
        self._step: Vectors | None = None
        self._centroids: Vectors | None = None
        if isinstance(self._stored, faiss.IndexScalarQuantizer):
            self._low, self._step = _ranges(self._stored.sq)
        elif isinstance(self._stored, faiss.IndexPQ):
            pq = self._stored.pq
            self._centroids = faiss.vector_to_array(pq.centroids).reshape(pq.M, pq.ksub, pq.dsub)

    @staticmethod
    def supports(index: Any) -> bool:
        """Whether this knows the codes of an index."""
        import faiss

        if not hasattr(index, "storage"):
            return False
        stored, scalar = faiss.downcast_index(index.storage), faiss.ScalarQuantizer
        if type(stored) is faiss.IndexScalarQuantizer:
            return stored.sq.qtype in (scalar.QT_8bit, scalar.QT_8bit_uniform, scalar.QT_fp16)
        if type(stored) is faiss.IndexPQ:
            return bool(stored.pq.nbits == 8)
        return type(stored) in (faiss.IndexFlat, faiss.IndexFlatIP, faiss.IndexFlatL2)

    def arrays(self) -> Storage:
        import faiss

        rows = self._stored.ntotal
        codes = faiss.rev_swig_ptr(self._stored.codes.data(), self._stored.codes.size())
        codes = codes.reshape(rows, -1)
        kind = BYTES
        if isinstance(self._stored, faiss.IndexFlat):
            kind = FLOATS
        elif self._centroids is not None:
            kind = SUBVECTORS
        elif self._step is None:
            kind = HALVES
        return Storage(
            kind,
            codes.view(np.float32) if kind == FLOATS else np.empty((0, 0), np.float32),
            codes.view(np.uint16) if kind == HALVES else np.empty((0, 0), np.uint16),
            codes,
        )

    def query(self, vector: Vectors) -> Query:
        """The question `vector`, float32 [d]."""
        values, scales, base = vector, np.ones_like(vector), 0.0
        table = np.empty((0, 0), np.float32)
        if self._centroids is not None:
            table = self._table(vector)
        elif self._low is not None and self._step is not None:
            if self._inner_product:
                base = -float(vector @ self._low)
                values = vector * self._step
            else:
                values, scales = vector - self._low, self._step
        return Query(self._inner_product, values, scales, base, table)

    def scores(self, distances: Vectors) -> Vectors:
        """What Faiss calls distances that a walk measured."""
        return -distances if self._inner_product else distances

    def _table(self, vector: Vectors) -> Vectors:
        """Distances from each part of a question to each centroid of that part: [m, 256]."""
        assert self._centroids is not None
        parts = vector.reshape(len(self._centroids), 1, -1)
        if self._inner_product:
            products: Vectors = (self._centroids * parts).sum(axis=2)
            return -products
        squares: Vectors = np.square(self._centroids - parts).sum(axis=2)
        return squares


def _ranges(quantizer: Any) -> tuple[Vectors | None, Vectors | None]:
    """(low, step) of each dimension, float32 [d]: a code means low + code × step."""
    import faiss

    if quantizer.qtype == faiss.ScalarQuantizer.QT_fp16:
        return None, None
    trained = faiss.vector_to_array(quantizer.trained)
    # One range for every dimension, or one range for all of them.
    low, extent = np.broadcast_to(trained.reshape(2, -1), (2, quantizer.d))
    step = extent / np.float32(_CODES_OF_A_BYTE - 1)
    # A code stands for the middle of its step.
    return low + step / 2, step
