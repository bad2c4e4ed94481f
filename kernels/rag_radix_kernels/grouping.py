"""Which requests of a batch begin with the same KV.

A slot of the KV pool holds one position of one path: a node of the tree owns its slots alone, a
request's row names the slots of the nodes on its path from the root, and whatever isn't in the
tree yet is in one request's row only. Two rows with the same slot at a position are therefore on
the same path up to there: they have the same slots at every position before it. So rows needn't
be read: one slot in every block of tokens says in which block two of them part, and only that
block is compared. Pages larger than one token change nothing, since a page has one owner too.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

Matrix: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.integer]]
Vector: TypeAlias = np.ndarray[tuple[int], np.dtype[np.integer]]

BLOCK_TOKENS = 64
# Longer contexts are compared in longer blocks, so that a plan's cost has a bound.
MAX_BLOCKS = 256
# Reads that a range must save, in keys, before it is read apart on CPU, where a further product and
# a merge cost as much as some 1,500: what `benchmarks/bench_shared_prefix.py --thresholds` shows.
MIN_SAVED_KEYS = 2048


class SharedRange(NamedTuple):
    """Positions at which some requests of a batch read the same slots.

    Attributes:
        requests: Places in the batch, ascending, at least two.
        start: First position.
        end: Position after the last one.
    """

    requests: tuple[int, ...]
    start: int
    end: int


def find_shared_ranges(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    lengths: Sequence[int],
    *,
    min_saved_keys: int = MIN_SAVED_KEYS,
) -> list[SharedRange]:
    """Ranges worth reading once for several requests.

    The ranges of a request are adjacent, begin at position 0 and narrow: what all share, then
    what fewer share. A range that saves too little joins the next one of each of its requests.

    Args:
        req_to_token: Int32 `[max_requests, max_context]`, the slot of each token of a request,
            on any device; from another one than the CPU, small copies to the host are made.
        request_rows: `[requests]`, the row of `req_to_token` of each request.
        lengths: Of each row, how many tokens may be shared.
        min_saved_keys: Keys that a range must save: its length for all its requests but one.

    Returns:
        In order of `start`, then of `requests`; the same for the same slots.
    """
    ranked = sorted(lengths, reverse=True)
    # No two share more than the second longest has.
    if len(ranked) < 2 or (len(ranked) - 1) * ranked[1] < min_saved_keys:
        return []
    rows = request_rows.cpu().numpy()
    samples, block = _samples(req_to_token, rows, lengths, ranked[1])
    names = [sample.tobytes() for sample in samples]
    order = sorted(range(len(names)), key=names.__getitem__)
    blocks = _equal_columns(samples[order[:-1]], samples[order[1:]])
    if not blocks.any():
        return []
    filled = np.array(lengths)[order]
    agreements = _agreements(req_to_token, rows[order], blocks * block, block)
    agreements = np.minimum(agreements, np.minimum(filled[:-1], filled[1:]))
    return _ranges(order, agreements.tolist(), min_saved_keys)


def find_own_starts(ranges: Sequence[SharedRange], requests: int) -> list[int]:
    """Where each of the requests of a batch begins to read alone, as `find_shared_ranges` sorts."""
    starts = [0] * requests
    for shared in ranges:
        for i in shared.requests:
            starts[i] = shared.end
    return starts


def _samples(
    req_to_token: torch.Tensor, rows: Vector, lengths: Sequence[int], longest: int
) -> tuple[Matrix, int]:
    """The last slot of each block of each request, and a block's length.

    A block that a request doesn't fill has a number that no other request has.
    """
    block = max(BLOCK_TOKENS, 1 << (longest // MAX_BLOCKS).bit_length())
    samples = _read(req_to_token, rows[:, None], np.arange(block - 1, longest, block))
    whole = np.array(lengths)[:, None] // block
    nobodys = -1 - np.arange(len(lengths), dtype=samples.dtype)
    return np.where(np.arange(samples.shape[1]) < whole, samples, nobodys[:, None]), block


def _agreements(req_to_token: torch.Tensor, rows: Vector, starts: Vector, block: int) -> Vector:
    """Leading slots that each row has in common with the next one, filled or not.

    They are known to agree up to `starts`, and to differ at the end of the block after it.
    """
    columns = np.minimum(starts[:, None] + np.arange(block), req_to_token.shape[1] - 1)
    left, right = (_read(req_to_token, r[:, None], columns) for r in (rows[:-1], rows[1:]))
    return starts + _equal_columns(left, right)


def _read(req_to_token: torch.Tensor, rows: Matrix, columns: Matrix | Vector) -> Matrix:
    if req_to_token.device.type == "cpu":
        slots: Matrix = req_to_token.numpy()[rows, columns]  # faster than torch for so few
    else:
        index = tuple(torch.from_numpy(i).to(req_to_token.device) for i in (rows, columns))
        slots = req_to_token[index].cpu().numpy()
    return slots


def _equal_columns(left: Matrix, right: Matrix) -> Vector:
    """Columns before the first in which a row of `left` differs from that of `right`."""
    differs = np.ones((left.shape[0], left.shape[1] + 1), dtype=bool)
    np.not_equal(left, right, out=differs[:, :-1])
    columns: Vector = differs.argmax(axis=1)
    return columns


def _ranges(
    order: Sequence[int], agreements: Sequence[int], min_saved_keys: int
) -> list[SharedRange]:
    """Descend from what all rows agree on to what neighbours in `order` agree on."""
    ranges = []
    pending = [(0, len(order), 0)]
    while pending:
        first, last, start = pending.pop()
        common = agreements[first : last - 1]
        end = min(common)
        if (last - first - 1) * (end - start) >= min_saved_keys:
            ranges.append(SharedRange(tuple(sorted(order[first:last])), start, end))
            start = end
        # Rows part where they agree no further than all do; two that don't part go on together.
        parts_from = first
        for i, n in enumerate(common, first + 1):
            if n == end:
                if i - parts_from > 1:
                    pending.append((parts_from, i, start))
                parts_from = i
        if last - parts_from > 1:
            pending.append((parts_from, last, start))
    return sorted(ranges, key=attrgetter("start", "requests"))
