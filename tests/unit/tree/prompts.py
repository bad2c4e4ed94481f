"""Prompts of a system text, documents and a question, as token ids with their spans."""

from __future__ import annotations

from collections.abc import Sequence

SYSTEM = list(range(100, 120))
DOCUMENT_TOKENS = 40

Prompt = tuple[list[int], list[tuple[str, int, int]]]


def document(name: str, tokens: int = DOCUMENT_TOKENS) -> list[int]:
    base = 1_000_000 + 1_000 * sum(ord(c) * 31**i for i, c in enumerate(name))
    return [base + i for i in range(tokens)]


def prompt(
    *names: str,
    question: int = 0,
    system: Sequence[int] = SYSTEM,
    tokens: int = DOCUMENT_TOKENS,
    question_tokens: int = 7,
) -> Prompt:
    ids, spans = list(system), []
    for name in names:
        spans.append((name, len(ids), len(ids) + tokens))
        ids += document(name, tokens)
    return ids + [500_000 + 100 * question + i for i in range(question_tokens)], spans
