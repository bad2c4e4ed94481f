"""Pages named by letters, written to files and read from them."""

from __future__ import annotations

from rag_radix.storage.files import SegmentFiles
from rag_radix.storage.segment import Name

PAGE_BYTES = 100


def page(name):
    return (name.encode() * PAGE_BYTES)[:PAGE_BYTES]


def opened(directory, identity="model", budget=None, priorities=None):
    return SegmentFiles(directory, identity, budget, lambda mark: (priorities or {}).get(mark, 0.0))


def store(files, *hashes, parent=None, names=(), batch=2):
    """A node of `hashes` behind the page `parent`, in batches as SGLang writes."""
    files.promise(parent, hashes, names)
    for start in range(0, len(hashes), batch):
        part = hashes[start : start + batch]
        files.write(part, [page(each) for each in part])


def read(files, *hashes):
    pages = [memoryview(bytearray(PAGE_BYTES)) for _ in hashes]
    count = files.read(hashes, pages)
    assert [bytes(got) for got in pages[:count]] == [page(each) for each in hashes[:count]]
    return count


def doc(name, tokens=2):
    return Name(name, "", "", tokens)
