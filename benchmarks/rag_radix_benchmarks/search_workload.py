"""Synthetic embeddings for search benchmarks, and Faiss indexes of them kept between runs.

Vectors are unit vectors around topics. Both topics and what differs within one fill the axes
unevenly, by a power law, as embeddings of text do: neighbours of a question then lie in several
clusters of an IVF index, the more of them the steeper the law.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import numpy.typing as npt

_TOPICS = 2000
_WITHIN_TOPIC = 0.8
_SPECTRUM_EXPONENT = 0.8
_ROWS_AT_ONCE = 8192
_HNSW_LINKS = 32

Vectors = npt.NDArray[np.float32]


class Workload(NamedTuple):
    """float32 [n, dimensions] rows of length 1 to be indexed, and questions of the same kind."""

    vectors: Vectors
    queries: Vectors


def make_workload(count: int, queries: int, dimensions: int, seed: int) -> Workload:
    """How many questions there are changes neither the vectors nor the first questions."""
    rng = np.random.default_rng(seed)
    topics = rng.standard_normal((_TOPICS, dimensions), dtype=np.float32)
    for_vectors, for_queries = rng.spawn(2)
    return Workload(_around(topics, count, for_vectors), _around(topics, queries, for_queries))


def _around(topics: Vectors, count: int, rng: np.random.Generator) -> Vectors:
    dimensions = topics.shape[1]
    spectrum = np.arange(1, dimensions + 1, dtype=np.float32) ** -_SPECTRUM_EXPONENT
    rows = np.empty((count, dimensions), dtype=np.float32)
    own = rng.integers(len(topics), size=count)
    for start in range(0, count, _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE]
        part[:] = rng.standard_normal(part.shape, dtype=np.float32) * _WITHIN_TOPIC
        part += topics[own[start : start + _ROWS_AT_ONCE]]
        part *= spectrum
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return rows


def load_or_build(kind: str, workload: Workload, directory: Path, seed: int) -> Any:
    """The index of a kind, such as `ivf`; built and kept the first time, which takes minutes.

    Built by one thread, so that the graph is the same each time.
    """
    count, dimensions = workload.vectors.shape
    recipe = {
        "ivf": f"IVF{round(4 * count**0.5)},Flat",
        "hnsw": f"HNSW{_HNSW_LINKS},Flat",
        "ivf-sq8": f"IVF{round(4 * count**0.5)},SQ8",
        "hnsw-sq8": f"HNSW{_HNSW_LINKS},SQ8",
    }[kind]
    path = directory / f"{recipe.replace(',', '-')}-{count}x{dimensions}-seed{seed}.faiss"
    if path.exists():
        return faiss.read_index(str(path))
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        index = faiss.index_factory(dimensions, recipe, faiss.METRIC_INNER_PRODUCT)
        index.train(workload.vectors)
        index.add(workload.vectors)
    finally:
        faiss.omp_set_num_threads(threads)
    directory.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    faiss.write_index(index, str(partial))
    partial.rename(path)
    return index
