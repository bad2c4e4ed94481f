"""Building an index directory from JSON lines."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rag_radix_frontend import store
from rag_radix_frontend.encoders import MINILM, Encoder, Vectors, load_encoder
from rag_radix_frontend.errors import ArgumentError, EncoderError
from rag_radix_frontend.index import INDEX_NAME, check_kind, write_index
from rag_radix_frontend.manifest import Manifest, record_files, write_manifest

_ENCODE_TEXTS = 256


def build_index(
    source_jsonl: str | Path,
    out_dir: str | Path,
    encoder: str | Encoder = MINILM,
    kind: str = "flat",
    *,
    overwrite: bool = False,
    progress: bool = False,
) -> Manifest:
    """Build `out_dir` from a file with one document a line.

    A line is `{"id": "...", "text": "...", "version": "...", "metadata": {...}}`, the last two
    optional. `kind` is `flat` (exact), `ivf` or `hnsw`; `ivf-sq8` and `hnsw-sq8` keep a byte of
    each value instead of four. The directory appears only when all of it is written; a build
    that fails or is interrupted leaves what was there as it was.

    Raises:
        SourceError: a line isn't a document or repeats an id.
        EncoderError: the encoder is unknown or returns something else than it promised.
        ArgumentError: the kind is unknown, or `out_dir` exists and `overwrite` is off.
    """
    source, out = Path(source_jsonl), Path(out_dir)
    check_kind(kind)
    if not source.is_file():
        raise ArgumentError(f"{source} is not a file")
    if out.exists() and not overwrite:
        raise ArgumentError(
            f"{out} exists; choose another directory, or replace it with overwrite "
            "(--overwrite on the command line)"
        )
    if isinstance(encoder, str):
        encoder = load_encoder(encoder)

    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the final rename stays within one file system.
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        fresh = work / "fresh"
        fresh.mkdir()
        documents = store.write_store(source, fresh, progress=progress)
        vectors = _encode(fresh, encoder, work / "vectors", progress)
        with tqdm(desc=f"Indexing ({kind})", total=documents, disable=not progress) as bar:
            write_index(vectors, kind, fresh, bar.update)
        manifest = Manifest(
            encoder=encoder.name,
            dimensions=encoder.dimensions,
            kind=kind,
            documents=documents,
            files=record_files(fresh, (*store.FILES, INDEX_NAME)),
        )
        write_manifest(fresh, manifest)
        if out.exists():
            out.rename(work / "replaced")
        fresh.rename(out)
    finally:
        shutil.rmtree(work)
    return manifest


def _encode(directory: Path, encoder: Encoder, path: Path, progress: bool) -> Vectors:
    """Vectors of all documents of a store, in a mapped file: float32 [n, dimensions]."""
    with store.DocumentStore(directory) as documents:
        shape = (len(documents), encoder.dimensions)
        vectors = np.memmap(path, dtype=np.float32, mode="w+", shape=shape)
        with tqdm(desc="Encoding documents", total=len(documents), disable=not progress) as bar:
            for start in range(0, len(documents), _ENCODE_TEXTS):
                stop = min(start + _ENCODE_TEXTS, len(documents))
                rows = encoder.encode([documents[i].text for i in range(start, stop)])
                if rows.shape != (stop - start, encoder.dimensions):
                    raise EncoderError(
                        f"encoder {encoder.name!r} returned shape {rows.shape} for "
                        f"{stop - start} texts of {encoder.dimensions} dimensions"
                    )
                vectors[start:stop] = rows
                bar.update(stop - start)
    return vectors
