"""Prompts for a trace that a real model can be asked: token ids, the same in every arm."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rag_radix.replay.trace import TraceRequest


def request_body(request: TraceRequest, ids: Sequence[int]) -> dict[str, Any]:
    """The `/generate` body of a request with this prompt, greedy and of exactly its output."""
    documents = [
        {"id": each.id, "version": each.version, "start": each.start, "end": each.end}
        for each in request.documents
    ]
    return {
        "input_ids": list(ids),
        "extra_key": request.namespace or None,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": max(request.output_tokens, 1),
            "ignore_eos": True,
            "custom_params": {"rag": {"documents": documents, "unit": "token"}},
        },
    }


class PromptWriter:
    """Gives texts that a trace says are equal the same random tokens.

    A document is known by id and version, template text by its place and length, and the
    question by the request's number in the trace.

    Args:
        vocabulary: Token ids to draw from.
        seed: Another seed gives other texts.
    """

    def __init__(self, vocabulary: Sequence[int], seed: int = 0) -> None:
        self._vocabulary = np.asarray(vocabulary)
        self._seed = seed

    def body(self, request: TraceRequest, number: int) -> dict[str, Any]:
        """The body of a request."""
        ids: list[int] = []
        for gap, document in enumerate(request.documents):
            ids += self._text("gap", gap, tokens=document.start - len(ids))
            ids += self._text(
                "document", document.id, document.version, tokens=document.end - document.start
            )
        ids += self._text("question", number, tokens=request.prompt_tokens - len(ids))
        return request_body(request, ids)

    def _text(self, *name: object, tokens: int) -> list[int]:
        digest = hashlib.blake2b(repr((self._seed, *name)).encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big"))
        drawn: list[int] = rng.choice(self._vocabulary, size=tokens).tolist()
        return drawn
