"""A page of documents, as the HTTP process puts it together from a scheduler's answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.runtime_context import get_parallel

from rag_radix.control.actions import ACTIONS
from rag_radix.control.documents import Page, survey


def documents(tree: Any, page: Page) -> dict[str, Any]:
    scheduler, asked, answers = SimpleNamespace(tree_cache=tree), survey(page), None
    while True:
        try:
            action, body = next(asked) if answers is None else asked.send(answers)
        except StopIteration as done:
            (answer,) = done.value
            return answer
        with get_parallel().override(attn_dp_rank=0, dp_rank=0):
            answers = [ACTIONS[action](scheduler, body)]
