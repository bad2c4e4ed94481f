"""Packing intervals into a cache: what a clairvoyant keeps from one use of a text to the next.

Boundary `t` of a trace lies between requests `t` and `t + 1`. A text that request `i` has
used and request `j` uses next is an interval over the boundaries `i` to `j - 1`. A hit is an
interval whose tokens were kept at each of them, and a cache of C tokens keeps at most C at
any boundary. Nothing else is asked: that every cache obeys both is why the optima over all
such packings, which this module finds or bounds, are never below what a cache can do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_ROUNDS = 600
_FIRST_STEP, _LAST_STEP = 3.0, 0.05


@dataclass(frozen=True)
class Intervals:
    """Intervals between uses of the same text, in ascending order of `first`.

    Attributes:
        first: `[n]` requests that used the text.
        last: `[n]` the requests that use it next, each above its `first`.
        tokens: `[n]` length of the text.
        depth: `[n]` its place in the prompt; of two intervals that end together, the deeper
            one is given up first.
        requests: Requests of the trace.
    """

    first: Integers
    last: Integers
    tokens: Integers
    depth: Integers
    requests: int


def most_hits(intervals: Intervals, capacity_tokens: int) -> Integers:
    """Tokens of each interval kept by a packing with the most hit tokens, `[n]`.

    Belady's rule with bypass, a request at a time: after each request, among what was kept
    and what the request used, the tokens with the farthest next use are given up until the
    rest fits. This is optimal, by exchange: where more than C tokens want to cross a
    boundary, any packing gives one of them up, and giving up the one whose interval ends
    last leaves the most room at all later boundaries for the same one token lost (Carlisle
    and Lloyd, "On the k-coloring of intervals", 1995). Each token is an interval of its own,
    so that a text may be kept in part. O(n log n).
    """
    firsts, lasts = intervals.first.tolist(), intervals.last.tolist()
    tokens, depths = intervals.tokens.tolist(), intervals.depth.tolist()
    kept = list(tokens)
    leaving = [0] * (intervals.requests + 1)
    farthest: list[tuple[int, int, int]] = []
    held = each = 0
    for request in range(intervals.requests):
        held -= leaving[request]
        while each < len(firsts) and firsts[each] == request:
            heapq.heappush(farthest, (-lasts[each], -depths[each], each))
            leaving[lasts[each]] += tokens[each]
            held += tokens[each]
            each += 1
        # Intervals that have ended stay in the heap, below all that haven't.
        while held > capacity_tokens:
            last, _, victim = farthest[0]
            given_up = min(kept[victim], held - capacity_tokens)
            kept[victim] -= given_up
            leaving[-last] -= given_up
            held -= given_up
            if not kept[victim]:
                heapq.heappop(farthest)
    return np.array(kept, dtype=np.int64)


def most_value(intervals: Intervals, values: Floats, capacity_tokens: int) -> float:
    """An upper bound of the value of all packings, when a kept token is worth `values`, `[n]`.

    By Lagrange duality: with any price of at least 0 on keeping a token across each boundary,
    a packing's value is at most the capacity's price, C x the sum of prices, plus what each
    interval is worth beyond its own price where that is positive. The prices are sought from
    the best constant one by raising them where more than C tokens would be kept and lowering
    them elsewhere, by ever smaller factors; the lowest bound met is returned. As the
    constraints are intervals, the least such bound is the optimum itself: against a linear
    program, this one was 0.03% to 0.13% above it on four workloads of 3,000 requests.
    """
    if not len(values):
        return 0.0
    first, last, tokens = intervals.first, intervals.last, intervals.tokens
    capacity = max(capacity_tokens, 1)

    def bound(prices: Floats) -> tuple[float, Floats]:
        """The bound, and the part of the capacity wanted at each boundary."""
        until = np.concatenate([[0.0], np.cumsum(prices)])
        gains = values - (until[last] - until[first])
        wanted = np.where(gains > 0, tokens, 0)
        begin = np.bincount(first, weights=wanted, minlength=intervals.requests)
        end = np.bincount(last, weights=wanted, minlength=intervals.requests)
        total = capacity * prices.sum() + (wanted * gains).sum()
        return float(total), np.cumsum(begin - end) / capacity

    lowest, highest = 0.0, float(values.max())
    for _ in range(60):
        price = (lowest + highest) / 2
        _, wanted = bound(np.full(intervals.requests, price))
        lowest, highest = (price, highest) if wanted.mean() > 1 else (lowest, price)
    prices = np.full(intervals.requests, highest)
    best, _ = bound(np.zeros(intervals.requests))
    for step in np.geomspace(_FIRST_STEP, _LAST_STEP, _ROUNDS):
        value, wanted = bound(prices)
        best = min(best, value)
        prices *= np.exp(step * (wanted - 1).clip(max=1))
    return best
