"""Statistics that another version of ours has written into a shared directory."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from unit.storage.stores import server
from unit.tree.prompts import prompt


def write_statistics(directory, content):
    text = json.dumps(content).encode()
    (path,) = directory.glob("*/")
    digest = sha256(text).hexdigest().encode()
    (path / "statistics.json").write_bytes(digest + b"\n" + text)


def read_statistics(directory):
    (path,) = directory.glob("*/statistics.json")
    return json.loads(path.read_bytes().partition(b"\n")[2])


OF_OTHERS = [
    {"format": 99, "new": 1},
    {"format": 1, "marks": [{"key": "x"}], "documents": [["a", "", ""]]},
    {"format": 1, "marks": ["x"], "documents": []},
    {"format": 1},
    [],
    "text",
    None,
]


@pytest.mark.parametrize("theirs", OF_OTHERS)
def test_what_another_version_writes_meanwhile_is_ignored(tmp_path, theirs):
    with server(tmp_path) as store:
        store.ask(prompt("a"))
        write_statistics(tmp_path, theirs)
        store.stop()
        assert not store.tree.enable_storage
    saved = read_statistics(tmp_path)
    assert saved["format"] == 1
    assert len(saved["marks"]) == 2


@pytest.mark.parametrize("theirs", OF_OTHERS)
def test_what_another_version_has_written_before_a_start_is_ignored(tmp_path, theirs, caplog):
    with server(tmp_path) as first:
        first.ask(prompt("a"))
    write_statistics(tmp_path, theirs)
    with server(tmp_path) as second:
        assert "can't be understood" in caplog.text
        assert second.ask(prompt("a", question=1)).from_storage > 0
