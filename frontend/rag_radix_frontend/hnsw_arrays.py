"""What the compiled walk of an HNSW search reads and writes: arrays, by name.

Apart from the walk, since numba takes memory and time to import.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FLOATS, HALVES, BYTES, SUBVECTORS = range(4)


class Graph(NamedTuple):
    """Faiss's links. Those of node `i` at level `l` fill `neighbors` from `offsets[i] +
    level_starts[l]` to `offsets[i] + level_starts[l + 1]`, and end at the first -1.
    """

    neighbors: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    level_starts: npt.NDArray[np.int64]
    entry_point: int
    max_level: int


class Storage(NamedTuple):
    """The vectors; of the three arrays the one that `kind` names is used, the others are empty.

    `FLOATS`: float32 [n, d]. `HALVES`: the bits of float16 values, uint16 [n, d]. `BYTES`: one
    byte for each value, uint8 [n, d]. `SUBVECTORS`: one byte for each subvector, uint8 [n, m].
    """

    kind: int
    floats: npt.NDArray[np.float32]
    halves: npt.NDArray[np.uint16]
    codes: npt.NDArray[np.uint8]


class Query(NamedTuple):
    """A question, in the form that the storage needs; a distance is lower for what is nearer.

    With `values` q, `scales` s and the stored x, the distance is `base - Σ q·x` for the inner
    product and `Σ (q - s·x)²` for L2; scales other than 1 belong to `BYTES`, which for the inner
    product have them in `values`. For `SUBVECTORS` it is `Σ table[j, code j]` with either metric.
    """

    inner_product: bool
    values: npt.NDArray[np.float32]
    scales: npt.NDArray[np.float32]
    base: float
    table: npt.NDArray[np.float32]


class Walk(NamedTuple):
    """Where a search is. The first `progress[0]` of the beam are known, nearest first.

    `beam_nodes` holds `~node` for nodes that were left. All before `progress[1]` were.
    `visited` has `mark` for every node seen. `fresh` and `fresh_distances` are scratch space for
    the neighbours of one node.
    """

    beam_nodes: npt.NDArray[np.int32]
    beam_distances: npt.NDArray[np.float32]
    progress: npt.NDArray[np.int64]
    visited: npt.NDArray[np.uint8]
    mark: int
    fresh: npt.NDArray[np.int32]
    fresh_distances: npt.NDArray[np.float32]
