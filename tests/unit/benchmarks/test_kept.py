"""Figures that are kept, and the digest of the code that they belong to."""

from __future__ import annotations

import sys

import pytest
from rag_radix_benchmarks.digest import code_digest
from rag_radix_benchmarks.kept import KeptFigures

from rag_radix.errors import ConfigError


def never():
    raise AssertionError("measured again")


def test_a_figure_is_measured_once_for_the_same_fields(tmp_path):
    path = tmp_path / "new" / "figures.jsonl"
    assert KeptFigures(path, {"seed": 1}).get(lambda: [1.5], case="a", repeat=0) == [1.5]
    again = KeptFigures(path, {"seed": 1})
    assert again.get(never, repeat=0, case="a") == [1.5]
    assert again.get(lambda: [2], case="a", repeat=1) == [2]
    assert KeptFigures(path, {"seed": 2}).get(lambda: [3], case="a", repeat=0) == [3]


def test_without_a_file_figures_last_as_long_as_the_process():
    kept = KeptFigures(None, {})
    assert kept.get(lambda: 1, case="a") == kept.get(never, case="a")


def test_a_figure_that_was_cut_off_is_measured_again(tmp_path):
    path = tmp_path / "figures.jsonl"
    KeptFigures(path, {}).get(lambda: 1, case="a")
    KeptFigures(path, {}).get(lambda: 2, case="b")
    path.write_bytes(path.read_bytes()[:-3])
    again = KeptFigures(path, {})
    assert again.get(never, case="a") == 1
    assert again.get(lambda: 3, case="b") == 3
    assert KeptFigures(path, {}).get(never, case="b") == 3


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "figures.jsonl"
    path.write_text('{"key": 1}\n')
    with pytest.raises(ConfigError, match=r"figures.jsonl:1 is no finished figure"):
        KeptFigures(path, {})
    with pytest.raises(ConfigError, match="can't be kept"):
        KeptFigures(path / "below", {})


def test_a_digest_is_of_every_source_that_is_named(tmp_path, monkeypatch):
    package = tmp_path / "digested" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "digested" / "__init__.py").touch()
    (tmp_path / "digested_alone.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for changed in (None, package / "some.py", tmp_path / "digested_alone.py"):
        if changed is not None:
            changed.write_text("x = 1\n")
        code_digest.cache_clear()
        found.append(code_digest("digested", "digested_alone"))
    assert len(set(found)) == 3
    assert found[-1] == code_digest("digested", "digested_alone")
    assert "digested_alone" not in sys.modules
