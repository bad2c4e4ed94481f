from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import orjson
import pytest
from rag_radix_frontend import Document
from rag_radix_frontend import store as store_module
from rag_radix_frontend.errors import DamagedIndexError, SourceError
from rag_radix_frontend.store import DocumentStore, write_store


def write_lines(path: Path, *lines: object) -> Path:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else orjson.dumps(x) for x in lines))
    return path


def test_documents_come_back_by_position_and_by_id(tmp_path: Path) -> None:
    documents = [
        Document(f"d/{i}", f"Text {i} ü\n", str(i % 3 or ""), {"n": i} if i % 2 else {})
        for i in range(300)
    ]
    lines = [
        {"id": d.id, "text": d.text, "version": d.version, "metadata": d.metadata}
        for d in documents
    ]
    source = write_lines(tmp_path / "in.jsonl", *lines)
    assert write_store(source, tmp_path) == 300
    with DocumentStore(tmp_path) as store:
        assert list(store) == documents
        assert all(store.by_id(d.id) == d for d in documents)
        with pytest.raises(KeyError, match="missing"):
            store.by_id("missing")
        for outside in (-1, 300):
            with pytest.raises(IndexError, match=str(outside)):
                store[outside]


def test_ids_whose_hashes_collide_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_hash", lambda id: len(id))
    source = write_lines(tmp_path / "in.jsonl", *({"id": i, "text": f"t{i}"} for i in "abcd"))
    write_store(source, tmp_path)
    with DocumentStore(tmp_path) as store:
        assert [store.by_id(i).text for i in "dcba"] == ["td", "tc", "tb", "ta"]
        with pytest.raises(KeyError):
            store.by_id("e")


def test_opening_maps_the_files_instead_of_loading_them(tmp_path: Path) -> None:
    write_store(write_lines(tmp_path / "in.jsonl", {"id": "a", "text": "t"}), tmp_path)
    with DocumentStore(tmp_path) as store:
        arrays = (store._offsets, store._ids, store._id_positions)
        assert all(isinstance(array, np.memmap) for array in arrays)
        assert isinstance(store._lines, mmap.mmap)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "b", "text": ', "not valid JSON"),
        (b"[1]", "is a list"),
        ({"text": "t"}, "'id' is missing"),
        ({"id": "b"}, "'text' is missing"),
        ({"id": 7, "text": "t"}, "'id' must be text"),
        ({"id": "b", "text": " \n"}, "'text' must be text that isn't empty"),
        ({"id": "b", "text": "t", "version": 3}, "'version' must be text"),
        ({"id": "b", "text": "t", "metadata": "m"}, "'metadata' must be an object"),
        ({"id": "b", "text": "t", "title": "T"}, "unknown field 'title'"),
        ({"id": "a", "text": "t"}, "id 'a' is already on line 1"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: object, reason: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"id": "a", "text": "t"}, b"", line)
    with pytest.raises(SourceError, match=f"line 3: .*{reason}"):
        write_store(source, tmp_path)


def test_a_source_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no documents"):
        write_store(write_lines(tmp_path / "in.jsonl", b"\n"), tmp_path)


def test_a_line_damaged_in_place_is_reported_when_it_is_read(tmp_path: Path) -> None:
    write_store(write_lines(tmp_path / "in.jsonl", {"id": "a", "text": "t"}), tmp_path)
    path = tmp_path / "documents.jsonl"
    path.write_bytes(b"#" * path.stat().st_size)
    with DocumentStore(tmp_path) as store, pytest.raises(DamagedIndexError, match="document 0"):
        store[0]


def test_files_of_two_stores_do_not_open_together(tmp_path: Path) -> None:
    write_store(write_lines(tmp_path / "in.jsonl", {"id": "a", "text": "t"}), tmp_path)
    np.save(tmp_path / "ids.npy", np.zeros(5, np.uint64))
    with pytest.raises(DamagedIndexError, match="1 documents but 5 ids"):
        DocumentStore(tmp_path)
