"""The walk of an HNSW search over Faiss's arrays, compiled, able to stop after any hop.

Importing this imports numba. The first walk of a machine compiles for some seconds; numba keeps
the result beside this file or, where that isn't writable, in the user's cache directory.

The walk is Faiss's (`HNSW::search` with a bounded queue; Malkov and Yashunin, "Efficient and
robust approximate nearest neighbor search using hierarchical navigable small world graphs",
algorithms 2 and 5): of the `ef` nearest vectors seen so far, the beam, the nearest one not yet
left is left next, until all are. Faiss keeps them in a heap, this a sorted array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from rag_radix_frontend.hnsw_arrays import BYTES, FLOATS, HALVES, Graph, Query, Storage, Walk

# Sums may be added up in another order than written, which is what lets them use wide registers.
_SUM = {"reassoc", "nsz", "contract"}


@intrinsic
def _float_of_half(typing_context: Any, bits: Any) -> Any:
    """The float32 that the bits of a float16 mean."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@njit(fastmath=_SUM, nogil=True)
def _product(query: Query, row: Any) -> Any:
    total = np.float32(0)
    for i in range(row.shape[0]):
        total += query.values[i] * row[i]
    return np.float32(query.base) - total


@njit(fastmath=_SUM, nogil=True)
def _squared_distance(query: Query, row: Any) -> Any:
    total = np.float32(0)
    for i in range(row.shape[0]):
        difference = query.values[i] - query.scales[i] * row[i]
        total += difference * difference
    return total


@njit(fastmath=_SUM, nogil=True)
def _product_of_halves(query: Query, row: Any) -> Any:
    total = np.float32(0)
    for i in range(row.shape[0]):
        total += query.values[i] * _float_of_half(row[i])
    return np.float32(query.base) - total


@njit(fastmath=_SUM, nogil=True)
def _squared_distance_of_halves(query: Query, row: Any) -> Any:
    total = np.float32(0)
    for i in range(row.shape[0]):
        difference = query.values[i] - _float_of_half(row[i])
        total += difference * difference
    return total


@njit(fastmath=_SUM, nogil=True)
def _looked_up(query: Query, row: Any) -> Any:
    total = np.float32(0)
    for j in range(row.shape[0]):
        total += query.table[j, row[j]]
    return total


@njit(nogil=True)
def _measure(storage: Storage, query: Query, nodes: Any, count: int, distances: Any) -> None:
    """Distances of the first `count` nodes."""
    if storage.kind == FLOATS:
        if query.inner_product:
            for i in range(count):
                distances[i] = _product(query, storage.floats[nodes[i]])
        else:
            for i in range(count):
                distances[i] = _squared_distance(query, storage.floats[nodes[i]])
    elif storage.kind == HALVES:
        if query.inner_product:
            for i in range(count):
                distances[i] = _product_of_halves(query, storage.halves[nodes[i]])
        else:
            for i in range(count):
                distances[i] = _squared_distance_of_halves(query, storage.halves[nodes[i]])
    elif storage.kind == BYTES:
        if query.inner_product:
            for i in range(count):
                distances[i] = _product(query, storage.codes[nodes[i]])
        else:
            for i in range(count):
                distances[i] = _squared_distance(query, storage.codes[nodes[i]])
    else:
        for i in range(count):
            distances[i] = _looked_up(query, storage.codes[nodes[i]])


@njit(nogil=True)
def _keep_nearer(walk: Walk, count: int) -> int:
    """Of the first `count` fresh nodes, sort those that a full beam has room for to the front."""
    full = walk.progress[0] == walk.beam_distances.shape[0]
    farthest = walk.beam_distances[walk.progress[0] - 1]
    kept = 0
    for c in range(count):
        distance, node = walk.fresh_distances[c], walk.fresh[c]
        if full and distance >= farthest:
            continue
        i = kept
        while i > 0 and walk.fresh_distances[i - 1] > distance:
            walk.fresh_distances[i] = walk.fresh_distances[i - 1]
            walk.fresh[i] = walk.fresh[i - 1]
            i -= 1
        walk.fresh_distances[i] = distance
        walk.fresh[i] = node
        kept += 1
    return kept


@njit(nogil=True)
def _merge(walk: Walk, count: int) -> None:
    """Merge the first `count` fresh nodes, nearest first, into the beam, from its far end."""
    known, new = walk.progress[0] - 1, count - 1
    size = min(known + new + 2, walk.beam_distances.shape[0])
    for _ in range(known + new + 2 - size):  # the farthest have no room
        if known < 0 or (new >= 0 and walk.fresh_distances[new] >= walk.beam_distances[known]):
            new -= 1
        else:
            known -= 1
    place = size
    while new >= 0:
        place -= 1
        if known >= 0 and walk.beam_distances[known] > walk.fresh_distances[new]:
            walk.beam_distances[place] = walk.beam_distances[known]
            walk.beam_nodes[place] = walk.beam_nodes[known]
            known -= 1
        else:
            walk.beam_distances[place] = walk.fresh_distances[new]
            walk.beam_nodes[place] = walk.fresh[new]
            new -= 1
    walk.progress[0] = size
    walk.progress[1] = min(walk.progress[1], place)


@njit(cache=True, nogil=True)
def begin(graph: Graph, storage: Storage, query: Query, walk: Walk) -> None:
    """Descend through the upper levels, always to the nearest, and start the beam there."""
    fresh, distances = walk.fresh, walk.fresh_distances
    nearest: Any = graph.entry_point
    fresh[0] = nearest
    _measure(storage, query, fresh, 1, distances)
    nearest_distance = distances[0]
    for level in range(graph.max_level, 0, -1):
        moved = True
        while moved:
            moved = False
            start = graph.offsets[nearest] + graph.level_starts[level]
            count = 0
            for j in range(start, graph.offsets[nearest] + graph.level_starts[level + 1]):
                if graph.neighbors[j] < 0:
                    break
                fresh[count] = graph.neighbors[j]
                count += 1
            _measure(storage, query, fresh, count, distances)
            for i in range(count):
                if distances[i] < nearest_distance:
                    nearest, nearest_distance = np.int64(fresh[i]), distances[i]
                    moved = True
    walk.visited[nearest] = walk.mark
    walk.beam_nodes[0] = nearest
    walk.beam_distances[0] = nearest_distance
    walk.progress[0], walk.progress[1] = 1, 0


@njit(cache=True, nogil=True)
def advance(graph: Graph, storage: Storage, query: Query, walk: Walk, hops: int) -> bool:
    """Leave up to `hops` more nodes of the beam. True if none remains, so that the walk is over."""
    fresh, distances = walk.fresh, walk.fresh_distances
    while True:
        i = walk.progress[1]
        while i < walk.progress[0] and walk.beam_nodes[i] < 0:
            i += 1
        walk.progress[1] = i
        if i == walk.progress[0]:
            return True
        if hops == 0:
            return False
        hops -= 1
        node = walk.beam_nodes[i]
        walk.beam_nodes[i] = ~node
        start = graph.offsets[node]
        count = 0
        for j in range(start, start + graph.level_starts[1]):
            neighbor = graph.neighbors[j]
            if neighbor < 0:
                break
            if walk.visited[neighbor] != walk.mark:
                walk.visited[neighbor] = walk.mark
                fresh[count] = neighbor
                count += 1
        _measure(storage, query, fresh, count, distances)
        _merge(walk, _keep_nearer(walk, count))
