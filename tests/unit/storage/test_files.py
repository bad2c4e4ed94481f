"""Which pages a directory has, what leaves it first, and what must go with what."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from pathlib import Path

import pytest
from unit.storage.pages import doc, opened, page, read, store

from rag_radix.storage import directory as directory_module
from rag_radix.storage import files as files_module
from rag_radix.storage.segment import Name


@pytest.fixture(autouse=True)
def _looks_for_others_at_once(monkeypatch):
    monkeypatch.setattr(directory_module, "_RESCAN_S", 0.0)


def test_pages_are_found_by_another_server_and_after_a_restart(tmp_path):
    files, other = opened(tmp_path), opened(tmp_path)
    store(files, "a", "b", "c")
    for each in (files, other, opened(tmp_path)):
        assert each.count(["a", "b", "c", "d"]) == 3
        assert read(each, "a", "b", "c") == 3
        assert read(each, "b", "c") == 2


def test_what_was_not_promised_or_is_there_is_not_written(tmp_path):
    files = opened(tmp_path)
    assert files.write(("a",), [page("a")])
    assert files.count(["a"]) == 0
    store(files, "a", "b")
    before = files.counters.written_pages
    store(files, "a", "b")
    store(files, "a", "b", "c", batch=3)
    assert files.counters.written_pages == before + 1


@pytest.mark.parametrize("damage", [lambda b: b[:-1] + b"?", lambda b: b[:-1], lambda b: b"what"])
def test_a_damaged_file_is_skipped_with_a_warning(tmp_path, caplog, damage):
    files = opened(tmp_path)
    store(files, "a", "b")
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert read(files, "a", "b") <= 1
    assert files.count(["a"]) == 0
    assert read(opened(tmp_path), "a", "b") <= 1
    assert "is skipped" in caplog.text
    store(files, "a", "b")  # and takes its place when the document is computed again
    assert read(opened(tmp_path), "a", "b") == 2


def test_a_file_of_another_model_is_skipped_with_a_warning(tmp_path, caplog):
    store(opened(tmp_path, "model"), "a")
    assert opened(tmp_path, "another").count(["a"]) == 0
    assert "another model" in caplog.text


def test_what_was_left_half_written_goes_after_a_while(tmp_path):
    (tmp_path / ".1-1.tmp").write_bytes(b"old")
    os.utime(tmp_path / ".1-1.tmp", (0, 0))
    (tmp_path / ".2-1.tmp").write_bytes(b"new")
    opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".2-1.tmp"]


@pytest.mark.parametrize("jump_s", [-1e6, 0.0, 1e6])
def test_what_another_server_is_writing_stays_whatever_the_clock_says(
    tmp_path, monkeypatch, jump_s
):
    """The other one is in the midst of a file when the clock jumps and a server starts."""
    files, seen = opened(tmp_path), []
    now_s, replace = time.time(), Path.replace

    def replace_after_a_start(path, target):
        seen.append(path.name)
        monkeypatch.setattr(time, "time", lambda: now_s + jump_s)
        opened(tmp_path)
        assert path.exists()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_after_a_start)
    store(files, "a", "b")
    assert len(seen) == 1
    assert opened(tmp_path).count(["a", "b"]) == 2


def test_a_discarded_page_takes_along_what_hangs_below_it(tmp_path):
    files = opened(tmp_path)
    store(files, "a", "b", "c", "d")
    store(files, "e", parent="b")
    store(files, "f", parent="e")
    store(files, "g", parent="a")
    assert files.discard(["b"]) == 5
    for each in (files, opened(tmp_path)):
        assert each.count(["a", "b"]) == 1
        assert [each.count([h]) for h in "cdefg"] == [0, 0, 0, 0, 1]
        assert read(each, "a", "g") == 2


def test_a_page_that_two_servers_have_written_goes_from_the_files_of_both(tmp_path):
    one, other = opened(tmp_path), opened(tmp_path)
    store(one, "a", "b", "c", "d", batch=4)
    store(other, "a", "b", batch=2)
    store(other, "x", parent="b")
    for each in (one, other):
        each.look()
    other.discard(["b"])
    for each in (other, opened(tmp_path)):
        assert [each.count([h]) for h in "abcdx"] == [1, 0, 0, 0, 0]
        assert read(each, "a") == 1


def test_what_is_left_of_a_file_takes_no_names_from_another_servers_with_the_same_pages(tmp_path):
    one, other = opened(tmp_path), opened(tmp_path)
    store(one, "a", "b", "c", names=[doc("long", 3)], batch=4)
    store(other, "a", "b", names=[doc("short", 2)])
    for each in (one, other):
        each.look()
    other.discard_documents([("c", 3)], "b".__eq__)
    for each in (other, opened(tmp_path)):
        assert read(each, "a", "b", "c") == 2
        assert each.named("short") == [("b", 2, (doc("short", 2),))]
        assert each.documents() == ["short"]


def test_documents_whose_files_are_gone_take_no_memory(tmp_path):
    files = opened(tmp_path)
    store(files, "a", "b", names=[doc("one"), Name("one", "2", "", 2)])
    store(files, "c", parent="b", names=[doc("one", 3), doc("other", 1)])
    files.discard(["c"])
    assert files.documents() == ["one"]
    files.discard(["a"])
    assert (files.documents(), files.named("one")) == ([], [])


def retry(files):
    files._promises._retry_at_s = 0.0
    assert files.is_to_try_again()


def test_a_directory_that_was_removed_is_made_anew_at_the_next_try(tmp_path):
    files = opened(tmp_path / "of" / "rank")
    store(files, "a")
    shutil.rmtree(tmp_path / "of")
    store(files, "b")
    assert files.count(["b"]) == 0
    retry(files)
    for name in "ab":
        store(files, name)
        assert read(files, name) == 1
    assert files.counters.failed_writes == 1


def test_nothing_is_made_where_a_file_system_was_unmounted(tmp_path, monkeypatch):
    files = opened(tmp_path / "mount" / "rank")
    shutil.rmtree(tmp_path / "mount" / "rank")
    files._there._device = -1  # of the file system that was there
    store(files, "a")
    retry(files)
    assert list((tmp_path / "mount").iterdir()) == []
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "mount")
    store(files, "a")
    retry(files)  # another is mounted there now
    store(files, "a")
    assert read(files, "a") == 1


def test_what_is_promised_and_discarded_is_not_written(tmp_path):
    files = opened(tmp_path)
    files.promise(None, ("a", "b"), ())
    files.discard(["b"])
    assert files.write(("a", "b"), [page("a"), page("b")])
    assert len(files) == 0


def test_what_is_promised_anew_in_other_pieces_while_it_waits_is_written_as_promised(tmp_path):
    files = opened(tmp_path)
    whole = [page(each) for each in "abcd"]
    files.promise(None, ("a", "b", "c", "d"), [doc("whole", 4)])
    files.promise(None, ("a", "b"), ())
    files.promise("b", ("c", "d"), [doc("half")])
    files.write(tuple("abcd"), whole)
    for half in ("ab", "cd"):
        files.write(tuple(half), [page(each) for each in half])
    assert not len(files._promises)
    other = opened(tmp_path)
    assert read(other, "a", "b", "c", "d") == 4
    assert other.marks() == ["b", "d"]
    assert (other.names_at("b"), other.names_at("d")) == ((), (doc("half"),))


@pytest.mark.parametrize("anew", ["ab", "abc", "abcd"])
def test_what_is_discarded_while_it_waits_and_promised_anew_in_part_is_written(tmp_path, anew):
    files = opened(tmp_path)
    files.promise(None, ("a", "b", "c", "d"), ())
    files.discard(["a"])
    files.promise(None, tuple(anew), ())
    files.write(tuple("abcd"), [page(each) for each in "abcd"])
    files.write(tuple(anew), [page(each) for each in anew])
    assert opened(tmp_path).count(tuple("abcd")) == len(anew)


def test_a_document_goes_with_its_own_pages_and_not_with_a_head_that_others_share(tmp_path):
    files = opened(tmp_path)
    store(files, "s")
    store(files, "h", "x", "y", parent="s", names=[doc("first", 3)], batch=3)
    store(files, "z", parent="h", names=[doc("second", 2)])
    files.discard_documents([("y", 3)], lambda page: False)
    for each in (files, opened(tmp_path)):
        assert [each.count([h]) for h in "shxyz"] == [1, 1, 0, 0, 1]
    files.discard_documents([("z", 2)], lambda page: False)
    assert [opened(tmp_path).count([h]) for h in "shz"] == [1, 0, 0]


def test_a_document_whose_end_has_left_goes_all_the_same(tmp_path):
    files = opened(tmp_path)
    store(files, "a", "b", "c", "d", names=[doc("long", 4)])
    files.discard(["c"])
    files.discard_documents([("d", 4)], lambda page: False)
    assert opened(tmp_path).count(["a"]) == 0


def test_a_page_at_which_another_document_ends_stays(tmp_path):
    files = opened(tmp_path)
    store(files, "a", "b", "c", names=[doc("long", 3)], batch=3)
    files.discard_documents([("c", 3)], "b".__eq__)
    assert opened(tmp_path).count(["a", "b", "c"]) == 2


def test_names_of_documents_are_in_the_files(tmp_path):
    names = (doc("long", 3), doc("alias", 1))
    store(opened(tmp_path), "a", "b", "c", names=names)
    files = opened(tmp_path)
    assert sorted(files.documents()) == ["alias", "long"]
    assert files.named("alias") == [("c", 3, names)]
    files.discard(["a"])
    assert files.named("alias") == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_warned_of_once_and_used_again_when_it_is_well(
    tmp_path, monkeypatch, caplog, error
):
    files = opened(tmp_path)

    def fail(*args):
        raise OSError(error, "no")

    with monkeypatch.context() as broken:
        broken.setattr(files_module, "write_segment", fail)
        for name in "abc":
            store(files, name)
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert ("is full" in warnings[0].getMessage()) == (error == errno.ENOSPC)
    assert files.counters.failed_writes == 3
    store(files, "a")
    assert files.count(["a"]) == 1


def test_a_directory_that_cannot_be_used_is_as_good_as_none(tmp_path, caplog):
    (tmp_path / "file").write_text("not a directory")
    files = opened(tmp_path / "file" / "below")
    store(files, "a")
    assert files.count(["a"]) == 0
    assert "can't be used" in caplog.text


def test_a_file_that_another_server_has_removed_is_a_miss(tmp_path, caplog):
    files = opened(tmp_path)
    store(files, "a")
    opened(tmp_path).clear()
    assert read(files, "a") == 0
    assert files.count(["a"]) == 0
    assert caplog.text == ""
