"""The shape of the statistics answer."""

from __future__ import annotations

import pytest
from fastapi import HTTPException

from rag_radix.http_routes import assemble


def test_one_rank_stands_at_the_top_level() -> None:
    answer = assemble([{"rag_radix": {"documents": 3}, "other": 1}])
    assert answer["documents"] == 3
    assert set(answer) == {"documents", "door"}


def test_several_ranks_are_listed() -> None:
    answer = assemble([{"rag_radix": {"documents": 3}}, {"rag_radix": {"documents": 4}}])
    assert answer["ranks"] == [{"documents": 3}, {"documents": 4}]


def test_a_scheduler_without_a_knowledge_tree_is_an_error() -> None:
    with pytest.raises(HTTPException, match="no knowledge tree"):
        assemble([{"rag_radix": {}}, {}])
