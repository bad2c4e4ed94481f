"""Which token ids are let through to the model."""

from __future__ import annotations

from typing import Any

import pytest

from rag_radix.errors import PromptError
from rag_radix.vocabulary import check_token_ids


@pytest.mark.parametrize("prompt", [None, [0], [0, 99, 5], [[1], [2, 3]], list(range(100))])
def test_what_the_model_has_passes(prompt: Any) -> None:
    check_token_ids(prompt, 100)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([100], "input_ids[0] is 100, which is no token of the model: they are integers from 0"),
        ([1, 2**31 - 1], "input_ids[1] is 2147483647"),
        ([1, 2**80], "input_ids[1] is 1208925819614629174706176"),
        ([5, -1], "input_ids[1] is -1"),
        ([1.0], "input_ids[0] is 1.0"),
        ([1, float("nan")], "input_ids[1] is nan"),
        ([1, None], "input_ids[1] is None"),
        ([1, "2"], "input_ids[1] is '2'"),
        ([1, [2]], "input_ids[1] is [2]"),
        ([[1], [2, 100]], "input_ids[1][1] is 100"),
        ([[1], 2], "input_ids[1] must be an array"),
        ([[1], []], "input_ids[1] must be an array of token ids and not empty, not []"),
        ([], "input_ids must be an array of token ids and not empty"),
        ("abc", "input_ids must be an array of token ids, not 'abc'"),
        ({"0": 1}, "input_ids must be an array"),
    ],
)
def test_what_it_has_not_is_named(prompt: Any, problem: str) -> None:
    with pytest.raises(PromptError) as error:
        check_token_ids(prompt, 100)
    assert problem in str(error.value)
    assert len(str(error.value)) < 200
