"""A file of pages is whole, verified and ours, or isn't served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rag_radix.storage import segment
from rag_radix.storage.segment import (
    DamagedFileError,
    Header,
    Name,
    page_digest,
    read_header,
    read_pages,
    write_segment,
)

PAGES = [bytes([n]) * 64 for n in range(4)]


@pytest.fixture
def written(tmp_path):
    header = Header(
        identity="model",
        parent=None,
        hashes=("h0", "h1", "h2", "h3"),
        digests=tuple(map(page_digest, PAGES)),
        page_bytes=64,
        mark="h3",
        mark_pages=4,
        names=(Name("wiki/1\n", "v", "", 40),),
    )
    path = tmp_path / "file.kv"
    write_segment(path, header, PAGES)
    return path, header


def read(path, header, first, count):
    pages = [memoryview(bytearray(64)) for _ in range(count)]
    read_pages(path, header, first, pages)
    return [bytes(page) for page in pages]


def test_what_was_written_is_read_whole_or_in_part(written):
    path, header = written
    assert read_header(path) == header
    assert read(path, header, 0, 4) == PAGES
    assert read(path, header, 2, 1) == PAGES[2:3]


def test_a_flipped_bit_anywhere_is_noticed(written):
    path, _ = written
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(DamagedFileError):
            read(path, read_header(path), 0, 4)


def test_a_file_cut_off_anywhere_is_noticed(written):
    path, _ = written
    whole = path.read_bytes()
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFileError):
            read_header(path)


def test_another_format_is_named(written, monkeypatch):
    path, _ = written
    monkeypatch.setattr(segment, "FORMAT_VERSION", 99)
    with pytest.raises(DamagedFileError, match="format 2, not 99"):
        read_header(path)


def test_nothing_is_left_of_a_file_that_cannot_be_written(written, monkeypatch):
    path, header = written
    path.unlink()

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_segment(path, replace(header, parent="x"), PAGES)
    assert list(path.parent.iterdir()) == []
