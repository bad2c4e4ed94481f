from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rag_radix_frontend.cli import add_index_commands


def run(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="rag-radix")
    add_index_commands(parser.add_subparsers(required=True))
    arguments = parser.parse_args([str(word) for word in words])
    status: int = arguments.run(arguments)
    return status


def test_an_index_is_built_and_described(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("index", "build", corpus, "--out", tmp_path / "i", "--kind", "hnsw") == 0
    built = capsys.readouterr()
    assert "40 documents, hnsw index, encoder minilm (384 dimensions)" in built.out
    assert "Encoding documents: 100%" in built.err
    assert run("index", "info", tmp_path / "i", "--verify") == 0
    assert capsys.readouterr().out == built.out


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"id": "a", "text": "t"}\n{"id": "b"', "line 2: not valid JSON"),
        (
            '{"id": "a", "text": "t"}\n{"id": "a", "text": "u"}',
            "line 2: id 'a' is already on line 1",
        ),
    ],
)
def test_a_bad_source_is_one_line_on_stderr_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, named: str
) -> None:
    source = tmp_path / "docs.jsonl"
    source.write_text(content)
    assert run("index", "build", source, "--out", tmp_path / "i") == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("rag-radix")]
    assert named in line


def test_a_foreign_directory_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("index", "info", tmp_path) == 1
    assert "is not an index" in capsys.readouterr().err
