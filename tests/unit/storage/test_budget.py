"""What files may take, and which leave for it."""

from __future__ import annotations

import pytest
from unit.storage.pages import opened, store
from unit.storage.stores import server
from unit.tree.prompts import DOCUMENT_TOKENS, SYSTEM, prompt

from rag_radix.storage import directory as directory_module


@pytest.fixture(autouse=True)
def _looks_for_others_at_once(monkeypatch):
    monkeypatch.setattr(directory_module, "_RESCAN_S", 0.0)


def size_of_one(tmp_path):
    files = opened(tmp_path / "probe")
    store(files, "a")
    return files.bytes


def test_the_lowest_priority_leaves_first_and_the_end_of_a_path_before_its_beginning(tmp_path):
    one = size_of_one(tmp_path)
    priorities = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 9.0, "e": 9.0}
    files = opened(tmp_path / "files", budget=int(one * 3.5), priorities=priorities)
    store(files, "a")
    store(files, "c", parent="a")
    store(files, "b")
    store(files, "d")
    assert [files.count([h]) for h in "abcd"] == [1, 0, 1, 1]
    store(files, "e")
    assert [files.count([h]) for h in "acde"] == [1, 0, 1, 1]
    assert files.bytes <= one * 3.5
    on_disk = sum(path.stat().st_size for path in (tmp_path / "files").iterdir())
    assert on_disk == files.bytes


def test_what_is_worth_less_than_all_that_is_there_is_not_written(tmp_path):
    one = size_of_one(tmp_path)
    priorities = {"a": 3.0, "b": 2.0}
    files = opened(tmp_path / "files", budget=int(one * 1.5), priorities=priorities)
    store(files, "a")
    store(files, "b")
    assert [files.count([h]) for h in "ab"] == [1, 0]


def test_a_smaller_budget_is_kept_whatever_the_files_are_worth(tmp_path):
    one = size_of_one(tmp_path)
    priorities = dict.fromkeys("abcde", 3.0) | {"c": 5.0, "n": 1.0}
    earlier = opened(tmp_path / "files", priorities=priorities)
    for name in "abcde":
        store(earlier, name)
    files = opened(tmp_path / "files", budget=int(one * 2.5), priorities=priorities)
    files.keep_budget()
    assert [files.count([h]) for h in "abcde"] == [0, 0, 1, 0, 1]
    store(earlier, "a")
    files.look()
    store(files, "n")  # another server has more
    assert [files.count([h]) for h in "acen"] == [0, 1, 1, 0]
    assert files.bytes == sum(path.stat().st_size for path in (tmp_path / "files").iterdir())


def test_a_start_with_a_smaller_budget_keeps_what_is_asked_for_most(tmp_path):
    with server(tmp_path, policy_config={"storage_gib": 1.0}) as first:
        for question in range(3):
            first.ask(prompt("d", question=question))
        for name in "abc":
            first.ask(prompt(name, question=3))
        taken = first.files.bytes
        first.stop()
    smaller = {"storage_gib": taken / 2 / 2**30}
    with server(tmp_path, policy_config=smaller) as second:
        assert 0 < second.files.bytes <= taken / 2
        on_disk = sum(path.stat().st_size for path in tmp_path.glob("*/*/*.kv"))
        assert on_disk == second.files.bytes
        asked = second.ask(prompt("d", question=4))
        assert asked.from_storage == len(SYSTEM) + DOCUMENT_TOKENS
