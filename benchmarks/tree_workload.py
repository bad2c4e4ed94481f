"""Seeded prompts of documents for trees to be measured with."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Length of a document of the population.
SMALL_TOKENS = 64


@dataclass(frozen=True)
class Prompt:
    """What one request asks for.

    Attributes:
        tokens: Its prompt.
        spans: Half-open token spans of its documents.
        names: Their ids.
        output: The tokens it generates.
    """

    tokens: array[int]
    spans: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    output: array[int]


class Workload:
    """Seeded prompts; every tree is given the same ones.

    A population prompt is one short document behind the template. A measured prompt is the
    template, `documents` documents of about `document_tokens` and a question; its leading
    documents are those of one of the last `window` prompts, none to all but one of them, so
    that it finds some on the device, some on host, and brings the rest.
    """

    def __init__(
        self,
        seed: int,
        *,
        documents: int = 5,
        document_tokens: int = 1600,
        window: int = 30,
        template_tokens: int = 32,
        question_tokens: int = 64,
        output_tokens: int = 32,
    ) -> None:
        self._numbers = np.random.default_rng(seed)
        self._documents = documents
        self._document_tokens = document_tokens
        self._window = window
        self._question_tokens = question_tokens
        self._output_tokens = output_tokens
        self._template = self._tokens(template_tokens)
        self._names = itertools.count()
        self._recent: list[list[tuple[str, array[int]]]] = []

    @property
    def prompt_tokens(self) -> int:
        """Most tokens of a measured request, output included."""
        return (
            len(self._template)
            + self._documents * self._document_tokens * 5 // 4
            + self._question_tokens
            + self._output_tokens
        )

    def population(self, documents: int) -> list[Prompt]:
        return [self._prompt([self._document(SMALL_TOKENS)], 1) for _ in range(documents)]

    def request(self) -> Prompt:
        documents = []
        if self._recent:
            earlier = self._recent[self._numbers.integers(len(self._recent))]
            documents = earlier[: self._numbers.integers(self._documents)]
        spread = self._document_tokens // 4
        while len(documents) < self._documents:
            tokens = self._document_tokens + int(self._numbers.integers(-spread, spread + 1))
            documents = [*documents, self._document(tokens)]
        self._recent = [*self._recent, documents][-self._window :]
        return self._prompt(documents, self._output_tokens)

    def _document(self, tokens: int) -> tuple[str, array[int]]:
        return f"document-{next(self._names)}", self._tokens(tokens)

    def _prompt(self, documents: Sequence[tuple[str, array[int]]], output_tokens: int) -> Prompt:
        tokens, spans = self._template[:], []
        for _, text in documents:
            spans.append((len(tokens), len(tokens) + len(text)))
            tokens += text
        if output_tokens > 1:
            tokens += self._tokens(self._question_tokens)
        names = tuple(name for name, _ in documents)
        return Prompt(tokens, tuple(spans), names, self._tokens(output_tokens))

    def _tokens(self, count: int) -> array[int]:
        tokens = array("q")
        tokens.frombytes(self._numbers.integers(0, 1 << 40, count, dtype=np.int64).tobytes())
        return tokens
