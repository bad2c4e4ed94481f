"""Files that fail, are damaged or are written anew by others: what must go can't hide in them."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import orjson
import pytest
from unit.storage.pages import PAGE_BYTES, doc, opened, page, read, store
from unit.storage.stores import server
from unit.tree.prompts import SYSTEM, prompt

from rag_radix.control.selector import Selector
from rag_radix.storage import directory as directory_module
from rag_radix.storage import files as files_module
from rag_radix.storage import segment as segment_module
from rag_radix.storage.segment import page_digest, read_header


@pytest.fixture(autouse=True)
def _looks_for_others_at_once(monkeypatch):
    monkeypatch.setattr(directory_module, "_RESCAN_S", 0.0)


def failing(*args, **options):
    raise OSError(errno.EMFILE, "Too many open files")


def damage_last_page(path):
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


def files_of(directory):
    return sorted(path.name for path in directory.glob("*.kv"))


def put(path, pages=(), **fields):
    """A file with a right checksum, whatever it says."""
    header = {
        "identity": "model",
        "parent": None,
        "hashes": ["a"],
        "digests": [page_digest(page("a"))],
        "page_bytes": PAGE_BYTES,
        "mark": "a",
        "mark_pages": 1,
        "names": [],
    }
    text = orjson.dumps({**header, **fields})
    prefix = segment_module._PREFIX.pack(
        segment_module._MAGIC,
        segment_module.FORMAT_VERSION,
        len(text),
        sha256(text).digest()[:16],
    )
    path.write_bytes(prefix + text + b"".join(pages))


def go(files, how):
    if how == "discard":
        files.discard(["a", "b"])
    elif how == "discard_documents":
        files.discard_documents([("b", 2)], lambda page: False)
    elif how == "discard_namespace":
        files.discard_namespace("")
    else:
        files.clear()


GONE_BY = ["discard", "discard_documents", "discard_namespace", "clear"]


@pytest.mark.parametrize("how", GONE_BY)
def test_what_could_not_be_read_for_a_moment_goes_all_the_same(tmp_path, monkeypatch, how):
    files = opened(tmp_path)
    store(files, "a", "b", names=[doc("one")])
    with monkeypatch.context() as broken:
        broken.setattr(files_module, "read_pages", failing)
        assert read(files, "a", "b") == 0
    taken = files.bytes
    assert taken == sum(path.stat().st_size for path in tmp_path.iterdir())
    go(files, how)
    assert files_of(tmp_path) == []
    assert opened(tmp_path).count(["a"]) == 0


def test_what_could_not_be_read_is_a_miss_for_a_while_and_may_be_written_anew(
    tmp_path, monkeypatch, caplog
):
    files = opened(tmp_path)
    store(files, "a", "b")
    with monkeypatch.context() as broken:
        broken.setattr(files_module, "read_pages", failing)
        for _ in range(3):
            assert read(files, "a", "b") == 0
    assert files.count(["a", "b"]) == 0
    assert len(caplog.records) == 1
    written = files.counters.written_pages
    store(files, "a", "b")
    assert files.counters.written_pages == written + 2
    assert files.count(["a", "b"]) == 2
    monkeypatch.setattr(directory_module, "_REST_S", 0.0)
    with monkeypatch.context() as broken:
        broken.setattr(files_module, "read_pages", failing)
        assert read(files, "a", "b") == 0
    assert read(files, "a", "b") == 2


@pytest.mark.parametrize("how", ["look", "clear"])
def test_a_file_whose_header_cannot_be_read_goes_before_anything_is_said_to_be_gone(
    tmp_path, monkeypatch, how
):
    store(opened(tmp_path), "a", "b")
    with monkeypatch.context() as broken:
        broken.setattr(directory_module, "read_header", failing)
        files = opened(tmp_path)
        assert files.count(["a"]) == 0
        assert len(files_of(tmp_path)) == 1
        getattr(files, how)()
    assert files_of(tmp_path) == []


def test_a_file_whose_header_could_not_be_read_is_found_when_it_can(tmp_path, monkeypatch, caplog):
    store(opened(tmp_path), "a", "b")
    monkeypatch.setattr(directory_module, "_REST_S", 0.0)
    with monkeypatch.context() as broken:
        broken.setattr(directory_module, "read_header", failing)
        files = opened(tmp_path)
        for _ in range(3):
            assert files.count(["a"]) == 0
    assert len(caplog.records) == 1
    assert files.count(["a", "b"]) == 2


@pytest.mark.parametrize("kept", [1.0, 0.9, 0.0])
def test_a_damaged_file_is_removed(tmp_path, kept):
    files = opened(tmp_path)
    store(files, "a", "b")
    (path,) = tmp_path.iterdir()
    damage_last_page(path)
    os.truncate(path, int(kept * path.stat().st_size))
    assert read(files, "a", "b") == (1 if kept else 0)
    assert files_of(tmp_path) == []
    assert (len(files), files.bytes, files.counters.damaged_files) == (0, 0, 1)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:40] + b"?" + b[41:]])
def test_a_damaged_file_that_is_found_at_a_start_is_removed(tmp_path, damage):
    store(opened(tmp_path), "a", "b")
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert len(opened(tmp_path)) == 0
    assert files_of(tmp_path) == []


def test_pages_before_a_damaged_one_are_read(tmp_path):
    files = opened(tmp_path)
    store(files, "a", "b", "c", "d", batch=4)
    damage_last_page(next(tmp_path.iterdir()))
    assert read(files, "a", "b", "c", "d") == 3


def test_the_beginning_of_a_document_goes_though_its_middle_was_damaged(tmp_path):
    files = opened(tmp_path)
    store(files, "a", "b", "c", "d", "e", "f", names=[doc("long", 6)])
    damage_last_page(next(path for path in tmp_path.iterdir() if path.name.startswith("c-")))
    assert read(files, "a", "b", "c", "d") == 3
    files.discard_documents([("f", 6)], lambda page: False)
    assert files_of(tmp_path) == []


def test_files_of_others_stay_whatever_happens(tmp_path):
    store(opened(tmp_path, "another"), "x")
    (tmp_path / "foreign.kv").write_bytes(b"something else")
    there = files_of(tmp_path)
    files = opened(tmp_path)
    store(files, "a", "b")
    files.look()
    files.discard(["a", "x"])
    files.clear()
    assert files_of(tmp_path) == there
    assert files.counters.damaged_files == 2  # said once each


def test_clear_removes_files_of_other_servers_that_were_not_seen_yet(tmp_path):
    files = opened(tmp_path)
    store(opened(tmp_path), "a", "b")
    files.clear()
    assert files_of(tmp_path) == []


def test_a_file_that_cannot_be_removed_is_found_no_more_and_removed_later(
    tmp_path, monkeypatch, caplog
):
    files = opened(tmp_path)
    store(files, "a", "b")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", failing)
        files.discard(["a"])
        for _ in range(3):
            files.look()
            assert files.count(["a"]) == 0
    assert ["can't be removed" in record.getMessage() for record in caplog.records] == [True]
    monkeypatch.setattr(directory_module, "_REST_S", 0.0)
    files.look()
    assert files_of(tmp_path) == []


def test_a_directory_that_cannot_be_read_before_something_goes_is_told(
    tmp_path, monkeypatch, caplog
):
    files = opened(tmp_path)
    store(files, "a", "b")
    with monkeypatch.context() as broken:
        broken.setattr(os, "scandir", failing)
        files.look()
    assert "Remove it once more when it can be read" in caplog.text
    files.discard(["a"])
    assert files_of(tmp_path) == []


def test_a_document_that_cannot_be_removed_may_be_stored_again(tmp_path, monkeypatch):
    files = opened(tmp_path)
    store(files, "a", "b")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", failing)
        files.discard(["a"])
    store(files, "a", "b")
    files.look()
    assert read(files, "a", "b") == 2


def write_others(directory, names, pages):
    """Another server writes the pages `a` and `b`, not knowing of ours."""
    away = directory.parent / "away"
    files = opened(away)
    files.promise(None, ("a", "b"), names)
    files.write(("a", "b"), pages)
    for path in away.glob("*.kv"):
        path.replace(directory / path.name)


@pytest.mark.parametrize("names", [[], [doc("alias", 2), doc("one", 2)]])
def test_what_another_server_has_written_in_its_place_is_read(tmp_path, names):
    directory = tmp_path / "files"
    files = opened(directory)
    store(files, "a", "b", names=[doc("one")])
    others = [bytes([n]) * PAGE_BYTES for n in range(2)]
    write_others(directory, names, others)
    pages = [memoryview(bytearray(PAGE_BYTES)) for _ in range(2)]
    assert files.read(("a", "b"), pages) == 2
    assert [bytes(each) for each in pages] == others
    assert files.counters.damaged_files == 0
    assert files.bytes == sum(path.stat().st_size for path in directory.iterdir())


def test_the_names_in_a_file_that_another_server_has_written_in_its_place_are_known(tmp_path):
    directory = tmp_path / "files"
    files = opened(directory)
    store(files, "a", "b", names=[doc("one")])
    write_others(directory, [doc("alias", 2)], [page("a"), page("b")])
    files.look()
    assert [mark for mark, _, _ in files.named("alias")] == ["b"]


@pytest.mark.parametrize("error", [FileNotFoundError, OSError, files_module.DamagedFileError])
def test_what_is_written_anew_while_it_is_read_in_vain_stays_whole(tmp_path, monkeypatch, error):
    files = opened(tmp_path)
    store(files, "a", "b")

    def racing(*args):
        files.discard(["a"])
        store(files, "a", "b")
        raise error("gone")

    with monkeypatch.context() as race:
        race.setattr(files_module, "read_pages", racing)
        assert read(files, "a", "b") == 0
    assert (len(files), len(files_of(tmp_path))) == (1, 1)
    assert files.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert read(files, "a", "b") == 2
    files.discard(["a"])
    assert (files.bytes, files_of(tmp_path)) == (0, [])


WRITE_AS_PROCESS_1 = """
import os, sys
from pathlib import Path
from rag_radix.storage.segment import write_atomically
os.getpid = lambda: 1
Path.replace = lambda temporary, path: print(temporary.name)
write_atomically(Path(sys.argv[1], "a.kv"), [b"a"])
"""


def test_servers_of_the_same_process_id_write_to_files_of_their_own(tmp_path):
    """As in containers that share a directory."""
    command = [sys.executable, "-c", WRITE_AS_PROCESS_1, str(tmp_path)]
    names = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(names) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"hashes": [], "digests": []},
        {"digests": []},
        {"hashes": ["a", "a"], "digests": ["", ""]},
        {"parent": "a"},
        {"names": [["a"]]},
        {"more": 1},
    ],
)
def test_a_header_that_contradicts_itself_is_skipped(tmp_path, fields):
    pages = [page("a")] * len(fields.get("hashes", ["a"]))
    put(tmp_path / "odd.kv", pages, **fields)
    files = opened(tmp_path)
    assert (len(files), files.counters.damaged_files) == (0, 1)
    assert read(files, "a") == 0
    files.discard_namespace("")


def test_a_file_that_is_read_in_small_pieces_is_not_damaged(tmp_path, monkeypatch):
    class Slow(io.FileIO):
        """As over a network."""

        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:7])

    def open_slowly(path, mode, buffering=-1):
        return io.BufferedReader(Slow(path)) if buffering else Slow(path)

    files = opened(tmp_path)
    store(files, "a", "b")
    monkeypatch.setattr(Path, "open", open_slowly)
    assert read(files, "a", "b") == 2


def test_what_is_left_of_another_process_hinders_no_start(tmp_path, caplog):
    (tmp_path / ".x.tmp").mkdir()
    os.utime(tmp_path / ".x.tmp", (0, 0))
    (tmp_path / ".y.tmp").symlink_to("nowhere")
    store(opened(tmp_path), "a")
    assert opened(tmp_path).count(["a"]) == 1
    assert caplog.text == ""


@pytest.mark.parametrize("damage", ["unreadable", "damaged"])
def test_an_invalidated_document_whose_file_failed_stays_away_after_a_restart(
    tmp_path, monkeypatch, damage
):
    def of_a(header):
        return any(name.id == "a" for name in header.names)

    with server(tmp_path) as first:
        first.ask(prompt("a"))
    if damage == "damaged":
        for path in tmp_path.glob("*/*/*.kv"):
            if of_a(read_header(path)):
                damage_last_page(path)
    read_pages = files_module.read_pages

    def fail(path, header, *args):
        if damage == "unreadable" and of_a(header):
            failing()
        return read_pages(path, header, *args)

    with server(tmp_path, policy_config={"store_after": 2}) as second:
        with monkeypatch.context() as broken:
            broken.setattr(files_module, "read_pages", fail)
            assert second.ask(prompt("a", question=1)).from_storage < len(SYSTEM) + 40
        second.tree.control.invalidate(Selector(id="a"))
        second.stop()
    assert not any(of_a(read_header(path)) for path in tmp_path.glob("*/*/*.kv"))
    with server(tmp_path) as third:
        assert third.ask(prompt("a", question=2)).from_storage <= len(SYSTEM)


def test_clear_removes_what_could_not_be_read(tmp_path, monkeypatch):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    with server(tmp_path, policy_config={"store_after": 2}) as second:
        monkeypatch.setattr(files_module, "read_pages", failing)
        second.ask(prompt("a", question=1))
        second.files.clear()
    assert list(tmp_path.glob("*/*/*.kv")) == []
