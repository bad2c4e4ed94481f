"""Search of a Faiss HNSW index that stops after some hops, says what it has found, and goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_radix_frontend.encoders import Vectors
from rag_radix_frontend.errors import ArgumentError
from rag_radix_frontend.hnsw_arrays import Graph, Walk
from rag_radix_frontend.hnsw_storage import StoredVectors
from rag_radix_frontend.pace import Pace, Stages
from rag_radix_frontend.staged_search import (
    DEFAULT_EF_SEARCH,
    Candidates,
    check_positive,
    check_query,
)

_UNLIMITED_HOPS = np.iinfo(np.int64).max
_MARKS = 255


class StagedHNSW:
    """One search of the graph, interrupted between hops and resumed where it was.

    The final stage is what Faiss's own search finds with the same `ef_search`, up to equal
    scores and the last digits of a score: storage is read by a compiled loop of ours. Flat,
    8-bit and fp16 scalar quantized and 8-bit product quantized storage, inner product and L2.

    A search makes about `ef_search` hops; `stages` says after which part of so many to stop
    (see `Pace`), by default as the time of a search suggests, which `warm_up()` or the first
    search measures. Faiss's arrays are read in place: the index must not change.

    Raises:
        ArgumentError: the index can't be searched this way, or an argument makes no sense.
    """

    def __init__(
        self, index: Any, *, ef_search: int = DEFAULT_EF_SEARCH, stages: Stages = None
    ) -> None:
        if not self.supports(index):
            raise ArgumentError(
                f"{type(index).__name__} can't be searched hop by hop; "
                "FaissSearch searches it in one stage"
            )
        check_positive("ef_search", ef_search)
        self._index = index
        self._ef_search = ef_search
        self._pace = Pace(stages, self._search_once)
        self._stored = StoredVectors(index)
        self._storage = self._stored.arrays()
        self._graph = _graph_of(index)
        self._most_links = int(np.diff(self._graph.level_starts).max())
        # Which nodes a search has seen, and with which mark. Searches take one each and put it
        # back; a thread may have several under way.
        self._idle_visited: deque[tuple[npt.NDArray[np.uint8], int]] = deque()

    @staticmethod
    def supports(index: Any) -> bool:
        """Plain HNSW over a storage that the compiled walk can read, not empty."""
        import faiss

        return (
            type(index) in (faiss.IndexHNSWFlat, faiss.IndexHNSWSQ, faiss.IndexHNSWPQ)
            # Older Faiss has one method.
            and getattr(index.hnsw, "search_method", 0) == 0
            and index.ntotal > 0
            and index.metric_type in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2)
            and StoredVectors.supports(index)
        )

    def search(self, vector: Vectors, k: int) -> Iterator[Candidates]:
        check_query(vector, self._index)
        return self._search(vector, k, self._pace.ends(self._beam_size(k)))

    def warm_up(self) -> None:
        """Compile the walk, and measure how long a search takes unless stages were given."""
        self._search_once()
        self._pace.ends(self._beam_size(1))

    def _search(self, vector: Vectors, k: int, ends: Sequence[int]) -> Iterator[Candidates]:
        from rag_radix_frontend.hnsw_walk import advance, begin

        query = self._stored.query(np.array(vector, dtype=np.float32))
        walk = self._new_walk(self._beam_size(k))
        try:
            begin(self._graph, self._storage, query, walk)
            over = False
            for start, end in pairwise((0, *ends)):
                hops = end - start if end < ends[-1] else _UNLIMITED_HOPS
                over = advance(self._graph, self._storage, query, walk, hops)
                yield self._candidates(walk, k, over)
                if over:
                    break
        finally:
            self._idle_visited.append((walk.visited, walk.mark))

    def _beam_size(self, k: int) -> int:
        return min(max(self._ef_search, k), len(self._storage.codes))

    def _new_walk(self, beam_size: int) -> Walk:
        try:
            visited, mark = self._idle_visited.pop()
        except IndexError:
            visited, mark = np.zeros(self._index.ntotal, dtype=np.uint8), 0
        if mark == _MARKS:
            visited[:] = 0
            mark = 0
        return Walk(
            beam_nodes=np.empty(beam_size, dtype=np.int32),
            beam_distances=np.empty(beam_size, dtype=np.float32),
            progress=np.zeros(2, dtype=np.int64),
            visited=visited,
            mark=mark + 1,
            fresh=np.empty(self._most_links, dtype=np.int32),
            fresh_distances=np.empty(self._most_links, dtype=np.float32),
        )

    def _candidates(self, walk: Walk, k: int, final: bool) -> Candidates:
        known = min(k, int(walk.progress[0]))
        nodes = walk.beam_nodes[:known]
        positions = np.where(nodes < 0, ~nodes, nodes).astype(np.int64)
        scores = self._stored.scores(walk.beam_distances[:known].copy())
        return Candidates(positions, scores, final)

    def _search_once(self) -> None:
        vector = np.random.default_rng(0).standard_normal(self._index.d, dtype=np.float32)
        list(self._search(vector, 1, [_UNLIMITED_HOPS]))


def _graph_of(index: Any) -> Graph:
    import faiss

    hnsw = index.hnsw
    return Graph(
        neighbors=faiss.rev_swig_ptr(hnsw.neighbors.data(), hnsw.neighbors.size()),
        offsets=faiss.rev_swig_ptr(hnsw.offsets.data(), hnsw.offsets.size()).view(np.int64),
        level_starts=faiss.vector_to_array(hnsw.cum_nneighbor_per_level).astype(np.int64),
        entry_point=hnsw.entry_point,
        max_level=hnsw.max_level,
    )
