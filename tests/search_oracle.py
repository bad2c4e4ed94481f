"""What a staged search must equal: Faiss's own, up to the order of equal scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import faiss
import numpy as np
from rag_radix_frontend.encoders import Vectors
from rag_radix_frontend.staged_search import Candidates, one_thread

METRICS = {"inner product": faiss.METRIC_INNER_PRODUCT, "L2": faiss.METRIC_L2}


def unit_vectors(count: int, dimensions: int, seed: int) -> Vectors:
    """Unit vectors in 50 groups."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(50, dimensions))
    rows = centres[rng.integers(50, size=count)] + 0.7 * rng.normal(size=(count, dimensions))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def make_index(
    recipe: str,
    metric: str,
    vectors: Vectors,
    before_training: Callable[[Any], None] = lambda index: None,
) -> Any:
    index = faiss.index_factory(vectors.shape[1], recipe, METRICS[metric])
    before_training(index)
    with one_thread():
        index.train(vectors[:1000])
        index.add(vectors)
    return index


def assert_equals_faiss(
    stages: Iterable[Candidates], index: Any, query: Vectors, k: int, parameters: Any
) -> list[Candidates]:
    """The last stage, and no other, is final and what Faiss finds; all are ordered and distinct."""
    stages = list(stages)
    assert [stage.final for stage in stages] == [False] * (len(stages) - 1) + [True]
    for stage in stages:
        assert len(set(stage.positions.tolist())) == len(stage.positions) <= k
        ascending = np.sort(stage.scores)
        best_first = ascending if index.metric_type == faiss.METRIC_L2 else ascending[::-1]
        np.testing.assert_array_equal(stage.scores, best_first)
        assert stage.positions.dtype == np.int64
        assert stage.scores.dtype == np.float32
    scores, positions = index.search(query[None, :], k, params=parameters)
    was_found = positions[0] >= 0
    scores, positions = scores[0][was_found], positions[0][was_found]
    final = stages[-1]
    np.testing.assert_allclose(final.scores, scores, rtol=1e-4, atol=2e-6)
    # Where scores are apart, the vectors are the same; where they tie, any of them may be there.
    differ = final.positions != positions
    nearest_other = np.abs(scores[:, None] - scores[None, :]) + np.where(np.eye(len(scores)), 9, 0)
    if differ.any():
        gap = nearest_other.min(axis=1)
        gap[-1] = 0  # what ties with the last one may have been left out
        assert (gap[differ] < 1e-4).all()
    return stages
