"""Prompts that share documents, from texts that every Python brings along."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

DOCUMENTS = 6
QUESTION_TOKENS = 24
# Together they reach what attention needs to read a prefix once for several requests.
DOCUMENT_TOKENS = 480


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids.

    Attributes:
        documents: Id, start and end of each.
    """

    tokens: tuple[int, ...]
    documents: tuple[tuple[str, int, int], ...]

    def __str__(self) -> str:
        ids = ", ".join(id_ for id_, _, _ in self.documents)
        return f"documents {ids}, {len(self.tokens):,} tokens"


def make_prompts(
    text: Sequence[int], count: int, *, page_tokens: int, limit_tokens: int, seed: int
) -> list[Prompt]:
    """Prompts on few paths of one to three documents, each with a question of its own.

    Documents end before, on and after the boundaries of pages.

    Args:
        text: Token ids to cut documents from.
        count: How many prompts.
        page_tokens: The server's page.
        limit_tokens: No prompt is longer.
        seed: Of the choice.
    """
    rng = random.Random(seed)
    longest = min(DOCUMENT_TOKENS, (limit_tokens - 2 * QUESTION_TOKENS) // 4)
    pages = max(longest // page_tokens, 1)
    documents = []
    for number in range(DOCUMENTS):
        size = min(pages * page_tokens + (number % 3 - 1), longest)
        start = rng.randrange(len(text) - size)
        documents.append(text[start : start + size])
    system = tuple(text[:QUESTION_TOKENS])
    paths = [rng.sample(range(DOCUMENTS), rng.randint(1, 3)) for _ in range(max(count // 6, 1))]
    prompts = []
    for number in range(count):
        tokens, spans = list(system), []
        # Neighbours are on one path, so that many of those asked at once are.
        for document in paths[number * len(paths) // count]:
            start = len(tokens)
            tokens += documents[document]
            spans.append((f"selftest/{document}", start, len(tokens)))
        start = rng.randrange(len(text) - QUESTION_TOKENS)
        tokens += text[start : start + QUESTION_TOKENS]
        prompts.append(Prompt(tuple(tokens), tuple(spans)))
    return prompts
