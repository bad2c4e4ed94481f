"""The vector index: Faiss, by inner product, exact or approximate, with a byte a value or four."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rag_radix_frontend.encoders import Vectors
from rag_radix_frontend.errors import ArgumentError, DamagedIndexError
from rag_radix_frontend.manifest import Manifest
from rag_radix_frontend.pace import Stages
from rag_radix_frontend.staged_hnsw import StagedHNSW
from rag_radix_frontend.staged_ivf import StagedIVF
from rag_radix_frontend.staged_search import FaissSearch, StagedSearch

INDEX_NAME = "vectors.faiss"
_HNSW_LINKS = 32
_ADD_ROWS = 4096
# Faiss asks for at least this many training vectors for each cluster.
_IVF_TRAINING_PER_CLUSTER = 39

KINDS = ("flat", "ivf", "hnsw", "ivf-sq8", "hnsw-sq8")


def write_index(
    vectors: Vectors, kind: str, directory: Path, on_rows: Callable[[int], object]
) -> None:
    """Index float32 [n, d] rows of length 1 and write `vectors.faiss`.

    `on_rows` is told how many rows were added, each time some were.
    """
    import faiss

    index = faiss.index_factory(
        vectors.shape[1], _recipe(kind, len(vectors)), faiss.METRIC_INNER_PRODUCT
    )
    if not index.is_trained:
        index.train(np.ascontiguousarray(vectors))
    for start in range(0, len(vectors), _ADD_ROWS):
        rows = np.ascontiguousarray(vectors[start : start + _ADD_ROWS])
        index.add(rows)
        on_rows(len(rows))
    faiss.write_index(index, str(directory / INDEX_NAME))


def read_index(directory: Path, manifest: Manifest) -> Any:
    """The Faiss index of a directory, checked against its manifest.

    Raises:
        DamagedIndexError: the file isn't a Faiss index or not the one the manifest describes.
    """
    import faiss

    path = directory / INDEX_NAME
    if manifest.kind not in KINDS:
        raise DamagedIndexError(f"{directory} is of unknown kind {manifest.kind!r}")
    try:
        index = faiss.read_index(str(path))
    except RuntimeError as error:
        raise DamagedIndexError(f"{path} is not a readable Faiss index: {error}") from error
    if index.ntotal != manifest.documents:
        raise DamagedIndexError(
            f"{path} holds {index.ntotal} vectors for {manifest.documents} documents"
        )
    if index.d != manifest.dimensions:
        raise DamagedIndexError(
            f"{path} holds vectors of {index.d} dimensions, the manifest says {manifest.dimensions}"
        )
    return index


def open_search(index: Any, *, nprobe: int, ef_search: int, stages: Stages) -> StagedSearch:
    """The search of an index that says most: in stages where its type allows that.

    Raises:
        ArgumentError: an argument makes no sense.
    """
    if StagedIVF.supports(index):
        return StagedIVF(index, nprobe=nprobe, stages=stages)
    if StagedHNSW.supports(index):
        return StagedHNSW(index, ef_search=ef_search, stages=stages)
    return FaissSearch(index, nprobe=nprobe, ef_search=ef_search)


def check_kind(kind: str) -> None:
    """Raises ArgumentError for a kind of index that doesn't exist."""
    if kind not in KINDS:
        raise ArgumentError(f"unknown kind of index {kind!r}; valid kinds are {', '.join(KINDS)}")


def _recipe(kind: str, rows: int) -> str:
    """The kind in the language of Faiss's `index_factory`."""
    if kind == "flat":
        return "Flat"
    structure, _, codes = kind.partition("-")
    storage = codes.upper() or "Flat"
    if structure == "hnsw":
        return f"HNSW{_HNSW_LINKS},{storage}"
    clusters = max(1, min(round(4 * rows**0.5), rows // _IVF_TRAINING_PER_CLUSTER))
    return f"IVF{clusters},{storage}"
