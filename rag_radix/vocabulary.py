"""Prompts given as token ids hold only tokens that the model has.

SGLang looks ids up in the model's embeddings unchecked, so one that isn't there ends the scheduler,
and every request in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from rag_radix.errors import PromptError


def check_token_ids(input_ids: Any, vocab_size: int) -> None:
    """Check the `input_ids` of a request: a prompt, or an array of them; None is no prompt.

    Raises:
        PromptError: Something in them is no token id; the message names it.
    """
    if input_ids is None:
        return
    if not isinstance(input_ids, list):
        raise PromptError(f"input_ids must be an array of token ids, not {input_ids!r:.40}")
    if input_ids and isinstance(input_ids[0], list):
        for index, prompt in enumerate(input_ids):
            _check_prompt(prompt, f"input_ids[{index}]", vocab_size)
    else:
        _check_prompt(input_ids, "input_ids", vocab_size)


def _check_prompt(prompt: Any, name: str, vocab_size: int) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise PromptError(f"{name} must be an array of token ids and not empty, not {prompt!r:.40}")
    try:
        ids: Sequence[int] = array("q", prompt)
    except (TypeError, OverflowError):
        ids = ()
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        index, wrong = next(
            (index, each)
            for index, each in enumerate(prompt)
            if not isinstance(each, int) or not 0 <= each < vocab_size
        )
        raise PromptError(
            f"{name}[{index}] is {wrong!r:.40}, which is no token of the model: they are integers "
            f"from 0 to {vocab_size - 1}"
        )
