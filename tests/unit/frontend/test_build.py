from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest
from rag_radix_frontend import CallableEncoder, FaissRetriever, build_index
from rag_radix_frontend.encoders import Vectors
from rag_radix_frontend.errors import (
    ArgumentError,
    DamagedIndexError,
    EncoderError,
    FrontendError,
    SourceError,
)
from rag_radix_frontend.index import INDEX_NAME, KINDS
from rag_radix_frontend.manifest import MANIFEST_NAME, read_manifest, verify_files
from rag_radix_frontend.retriever import final_documents


def hashed(texts: list[str]) -> list[Vectors]:
    return [np.random.default_rng(len(text)).normal(size=8) for text in texts]


HASHED = CallableEncoder("hashed", 8, hashed)  # type: ignore[arg-type]


@pytest.fixture
def built(corpus: Path, tmp_path: Path) -> Path:
    build_index(corpus, tmp_path / "index", HASHED)
    return tmp_path / "index"


def listing(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


def test_a_build_says_what_it_built(built: Path) -> None:
    manifest = read_manifest(built)
    assert (manifest.encoder, manifest.dimensions, manifest.kind) == ("hashed", 8, "flat")
    assert manifest.documents == 40
    assert set(manifest.files) | {MANIFEST_NAME} == set(listing(built))
    verify_files(built, manifest)


def test_a_build_leaves_nothing_but_the_index(built: Path) -> None:
    assert [p.name for p in built.parent.iterdir()] == ["index"]


def test_an_existing_directory_is_kept_unless_overwriting_is_asked_for(
    built: Path, corpus: Path
) -> None:
    with pytest.raises(ArgumentError, match="exists"):
        build_index(corpus, built, HASHED)
    build_index(corpus, built, HASHED, "hnsw", overwrite=True)
    assert read_manifest(built).kind == "hnsw"
    assert [p.name for p in built.parent.iterdir()] == ["index"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, EncoderError])
def test_a_build_that_stops_leaves_the_old_index_as_it_was(
    built: Path, corpus: Path, failure: type[BaseException]
) -> None:
    def stop(texts: object) -> list[Vectors]:
        raise failure

    before = listing(built)
    with pytest.raises(failure):
        build_index(corpus, built, CallableEncoder("stops", 8, stop), overwrite=True)
    assert listing(built) == before
    assert [p.name for p in built.parent.iterdir()] == ["index"]


def test_a_bad_source_is_found_before_anything_is_encoded(tmp_path: Path) -> None:
    source = tmp_path / "docs.jsonl"
    source.write_text('{"id": "a", "text": "t"}\nnonsense\n')
    with pytest.raises(SourceError, match=r"docs\.jsonl, line 2"):
        build_index(source, tmp_path / "index", "minilm")
    assert not (tmp_path / "index").exists()


def test_arguments_that_cannot_work_are_named(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'lsh'.*flat, ivf, hnsw"):
        build_index(corpus, tmp_path / "index", HASHED, "lsh")
    with pytest.raises(ArgumentError, match="absent"):
        build_index(tmp_path / "absent", tmp_path / "index", HASHED)
    with pytest.raises(EncoderError, match="'bert'"):
        build_index(corpus, tmp_path / "index", "bert")


def edit_manifest(directory: Path, **changes: object) -> None:
    path = directory / MANIFEST_NAME
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), **changes}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (shutil.rmtree, "not a directory"),
        (lambda d: (d / MANIFEST_NAME).unlink(), "not an index"),
        (lambda d: (d / MANIFEST_NAME).write_text("{"), "not valid JSON"),
        (lambda d: (d / MANIFEST_NAME).write_text("[]"), "not the manifest of a rag-radix-index"),
        (lambda d: edit_manifest(d, format="other"), "not the manifest of a rag-radix-index"),
        (lambda d: edit_manifest(d, format_version=9), "format version 9"),
        (lambda d: edit_manifest(d, dimensions="many"), "wrong one"),
        (lambda d: edit_manifest(d, files=[]), "wrong one"),
        (lambda d: edit_manifest(d, kind="lsh"), "unknown kind 'lsh'"),
        (lambda d: edit_manifest(d, documents=41), "41"),
        (lambda d: (d / "ids.npy").unlink(), "ids.npy is missing"),
        (lambda d: truncate(d / "documents.jsonl"), "documents.jsonl has .* truncated"),
        (lambda d: truncate(d / INDEX_NAME), f"{INDEX_NAME} has .* truncated"),
        (lambda d: garble(d / INDEX_NAME), "not a readable Faiss index"),
        (lambda d: garble(d / "offsets.npy"), "offsets.npy is missing or not"),
    ],
)
def test_opening_a_damaged_directory_says_what_is_wrong(
    built: Path, damage: object, named: str
) -> None:
    damage(built)  # type: ignore[operator]
    with pytest.raises(DamagedIndexError, match=named):
        FaissRetriever.open(built, encoder=HASHED)


def test_vectors_of_other_dimensions_than_the_manifest_says_are_refused(built: Path) -> None:
    edit_manifest(built, dimensions=9)
    other = CallableEncoder("hashed", 9, hashed)  # type: ignore[arg-type]
    with pytest.raises(DamagedIndexError, match="vectors of 8 dimensions, the manifest says 9"):
        FaissRetriever.open(built, encoder=other)


@pytest.mark.parametrize(
    ("encoder", "named"),
    [
        (CallableEncoder("other", 8, hashed), "built with encoder 'hashed', not 'other'"),  # type: ignore[arg-type]
        (CallableEncoder("hashed", 9, hashed), "has 9 dimensions, .* built with 8"),  # type: ignore[arg-type]
        (None, "unknown encoder 'hashed'"),
    ],
)
def test_an_encoder_that_is_not_the_one_of_the_index_is_refused(
    built: Path, encoder: CallableEncoder | None, named: str
) -> None:
    with pytest.raises(EncoderError, match=named):
        FaissRetriever.open(built, encoder=encoder)


def test_altered_bytes_are_found_by_verification(built: Path) -> None:
    path = built / "documents.jsonl"
    path.write_bytes(path.read_bytes().replace(b"Python", b"python", 1))
    with pytest.raises(DamagedIndexError, match="altered"):
        verify_files(built, read_manifest(built))


def test_one_document_makes_an_index_of_any_kind(tmp_path: Path) -> None:
    source = tmp_path / "docs.jsonl"
    source.write_text('{"id": "a", "text": "t"}\n')
    for kind in KINDS:
        build_index(source, tmp_path / kind, HASHED, kind)
        retriever = FaissRetriever.open(tmp_path / kind, encoder=HASHED)
        assert [d.document.id for d in final_documents(retriever, "t", 3)] == ["a"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_finds_every_document_of_a_collection(
    corpus: Path, tmp_path: Path, kind: str
) -> None:
    build_index(corpus, tmp_path / "index", HASHED, kind)
    retriever = FaissRetriever.open(tmp_path / "index", encoder=HASHED)
    assert len(final_documents(retriever, "t", 100)) == 40
    assert read_manifest(tmp_path / "index").kind == kind


@pytest.mark.parametrize("structure", ["ivf", "hnsw"])
def test_sq8_keeps_a_byte_of_each_value(corpus: Path, tmp_path: Path, structure: str) -> None:
    wide = CallableEncoder("wide", 256, lambda texts: np.ones((len(texts), 256)))
    for kind in (structure, f"{structure}-sq8"):
        build_index(corpus, tmp_path / kind, wide, kind)
    bytes_saved = (tmp_path / structure / INDEX_NAME).stat().st_size - (
        tmp_path / f"{structure}-sq8" / INDEX_NAME
    ).stat().st_size
    of_vectors, of_ranges = 40 * 256 * (4 - 1), 256 * 2 * 4
    assert of_vectors - of_ranges - 100 <= bytes_saved <= of_vectors


def test_every_expected_error_has_the_one_root() -> None:
    assert all(issubclass(e, FrontendError) for e in (ArgumentError, SourceError, EncoderError))
