"""Which order of some documents has the longest cached prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# Prefixes looked up at most. Eight documents of which none is cached take eight.
_LOOKUPS = 64


class Cached(NamedTuple):
    """What is cached of a prompt: `tokens` of it, and whether that is all of it."""

    tokens: int
    whole: bool


def cached_first(
    documents: int, look_up: Callable[[Sequence[int]], Cached]
) -> tuple[list[int], int]:
    """Order documents so that as much as possible of the prompt is cached.

    Documents are followed as deep as they are cached whole; what isn't cached, and what is
    cached alike, keeps the order given.

    Args:
        documents: How many there are.
        look_up: What is cached of the prompt that ends with the documents of these indices, in
            this order.

    Returns:
        Indices of all documents, and how many tokens of that prompt are cached.
    """
    best: list[int] = []
    most = 0
    lookups = 0
    cached_whole: list[list[int]] = [[]]
    while cached_whole:
        order = cached_whole.pop(0)
        for index in range(documents):
            if index in order or lookups == _LOOKUPS:
                continue
            lookups += 1
            longer = [*order, index]
            found = look_up(longer)
            if found.tokens > most:
                best, most = longer, found.tokens
            if found.whole:
                cached_whole.append(longer)
    return [*best, *(index for index in range(documents) if index not in best)], most
