"""Which prefills a profile measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rag_radix.errors import ConfigError

FIRST_NEW_TOKENS = 16
FIRST_HIT_TOKENS = 64
FIRST_CACHED_TOKENS = 256


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One kind of prefill: `new_tokens` behind `cached_tokens` found in `tier`."""

    tier: Literal["device", "host"]
    cached_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Lengths to measure, all multiples of the page size.

    Attributes:
        context_tokens: No prompt is longer.
        cached_tokens: Ascending prefix lengths of the cost table, from 0.
        new_tokens: Ascending extend lengths of the cost table.
        hit_tokens: Ascending prefix lengths of the comparison of cold, device and host.
    """

    context_tokens: int
    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    hit_tokens: tuple[int, ...]

    @property
    def rest_tokens(self) -> int:
        """New tokens behind each prefix of the comparison."""
        return self.new_tokens[0]

    def device_points(self) -> list[Point]:
        """Everything to measure but host hits: the table as far as it fits, and the comparison."""
        points = {
            Point("device", cached, new)
            for cached in self.cached_tokens
            for new in self.new_tokens
            if cached + new <= self.context_tokens
        }
        for length in self.hit_tokens:
            points |= {self.cold_point(length), self.hit_point(length, "device")}
        return sorted(points)

    def cold_point(self, length: int) -> Point:
        """The whole prompt of a comparison computed."""
        return Point("device", 0, length + self.rest_tokens)

    def hit_point(self, length: int, tier: Literal["device", "host"]) -> Point:
        """The same prompt with its prefix of `length` found in `tier`."""
        return Point(tier, length, self.rest_tokens)


def build_grid(context_tokens: int, page_size: int) -> Grid:
    """Powers of two from 16 (new), 64 (comparison) and 256 (cached) up to the context.

    The longest prefixes, three quarters of the context and all of it but the shortest extend,
    are there as well, since that is where attention costs most.

    Raises:
        ConfigError: The context is too short for a grid.
    """
    context = context_tokens // page_size * page_size
    rest = -(-FIRST_NEW_TOKENS // page_size) * page_size
    if context < 8 * rest:
        raise ConfigError(
            f"{context_tokens} tokens are too few to profile with pages of {page_size}: "
            f"give --max-tokens of at least {8 * rest}, or serve with a longer context"
        )

    def lengths(first: int, last: int) -> list[int]:
        steps = range((last // first).bit_length()) if last >= first else range(0)
        return [(first << step) // page_size * page_size for step in steps]

    longest = context - rest
    cached = lengths(max(FIRST_CACHED_TOKENS, page_size), context // 2)
    cached += [0, context * 3 // 4 // page_size * page_size, longest]
    return Grid(
        context_tokens=context,
        cached_tokens=tuple(sorted(set(cached))),
        new_tokens=tuple(sorted({*lengths(rest, context), context})),
        hit_tokens=tuple(sorted({*lengths(max(FIRST_HIT_TOKENS, page_size), longest), longest})),
    )
