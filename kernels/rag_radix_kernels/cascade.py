"""Attention level by level: what each query reads alone, then what ever more of them share.

This is cascade inference (Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix
Batch Decoding", 2024) over ranges that form a tree, on any device. Each level is one batched
attention in which all queries of a range are the queries of one sequence; what the levels give is
merged by the log-sum-exp of their scores. Nothing here knows what computes a level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch

from rag_radix_kernels.grouping import SharedRange, find_own_starts

# Outputs `[rows, heads, value_dim]` and log-sum-exps `[rows, heads]`, to whichever base.
State: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Merge: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], State]


@dataclass(frozen=True)
class Level:
    """One attention, unmasked, of runs of queries to the keys of each run.

    Attributes:
        rows: Int64 `[n]`, places of the queries; those of a run are adjacent here.
        query_starts: Int32 `[runs + 1]` on the host, where in `rows` each run begins.
        slots: Int32 `[keys]`, slots of the runs' keys in turn.
        key_starts: Int32 `[runs + 1]` on the host, where in `slots` each run's keys begin.
    """

    rows: torch.Tensor
    query_starts: torch.Tensor
    slots: torch.Tensor
    key_starts: torch.Tensor


def plan_levels(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    ranges: Sequence[SharedRange],
    lengths: Sequence[int],
    new_lens: Sequence[int],
) -> list[Level]:
    """The levels by which a batch reads its cached keys, every slot of a range once.

    Args:
        req_to_token: Int32 `[max_requests, max_context]`, the slot of each token of a request.
        request_rows: `[requests]`, the row of `req_to_token` of each request.
        ranges: As `find_shared_ranges` gives them.
        lengths: Keys that each request reads; beyond its ranges it reads them alone.
        new_lens: Queries of each request; those of a batch lie in turn.

    Returns:
        First what is read alone, unless nobody does, then the requests' first ranges, their
        second ones, and so on. Rows and slots are on the device of `req_to_token`.
    """
    depth = [0] * len(lengths)
    shared: list[list[SharedRange]] = []
    for range_ in ranges:
        level = depth[range_.requests[0]]
        if level == len(shared):
            shared.append([])
        shared[level].append(range_)
        for i in range_.requests:
            depth[i] += 1
    own_starts = find_own_starts(ranges, len(lengths))
    alone = [
        SharedRange((i,), start, length)
        for i, (start, length) in enumerate(zip(own_starts, lengths, strict=True))
        if start < length
    ]
    levels = [alone, *shared] if alone else shared
    return [_level(req_to_token, request_rows, level, new_lens) for level in levels]


def _level(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    runs: Sequence[SharedRange],
    new_lens: Sequence[int],
) -> Level:
    starts = list(accumulate(new_lens, initial=0))
    queries = [
        [row for i in run.requests for row in range(starts[i], starts[i + 1])] for run in runs
    ]
    keys = torch.tensor([run.end - run.start for run in runs])
    readers = torch.tensor([run.requests[0] for run in runs])
    first = torch.tensor([run.start for run in runs])
    # Key k of all is key k - key_starts[run] of its run.
    key_starts = torch.cat([torch.zeros(1, dtype=torch.int64), keys.cumsum(0)])
    columns = torch.arange(int(key_starts[-1])) + (first - key_starts[:-1]).repeat_interleave(keys)
    device = req_to_token.device
    places = request_rows[readers.repeat_interleave(keys).to(request_rows.device)].long()
    return Level(
        rows=torch.tensor([row for run in queries for row in run]).to(device),
        query_starts=_starts([len(run) for run in queries]),
        slots=req_to_token[places.to(device), columns.to(device)].int(),
        key_starts=key_starts.int(),
    )


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


def run_levels(
    query: torch.Tensor,
    levels: Sequence[Level],
    attend: Callable[[int, torch.Tensor], State],
    merge: Merge,
    state: State | None = None,
) -> torch.Tensor:
    """Attention of all queries to all that their levels read.

    Args:
        query: `[rows, heads, dim]`.
        levels: As `plan_levels` gives them.
        attend: The attention of a level, by its number, for the queries of its rows.
        merge: Of two states over disjoint keys; takes their outputs and log-sum-exps in turn.
        state: What is known already, by attention to other keys; changed in place. None takes
            the first level for it, which then has all rows.

    Returns:
        `[rows, heads, value_dim]`.
    """
    for number, level in enumerate(levels):
        part = attend(number, query[level.rows])
        if state is None:
            # The runs of the first level are the requests in the order of the batch.
            state = part
            continue
        output, lse = state
        output[level.rows], lse[level.rows] = merge(output[level.rows], lse[level.rows], *part)
    assert state is not None, "a pass without keys"
    return state[0]
