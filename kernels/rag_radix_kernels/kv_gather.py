"""Which slots of a KV pool a forward pass reads, and reading them without fresh memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from rag_radix_kernels.grouping import SharedRange

# Below this many keys a further split costs more than the threads it feeds can save.
MIN_SPLIT_KEYS = 512
# Work items per thread that keep all threads busy to the end.
ITEMS_PER_THREAD = 4


@dataclass(frozen=True)
class GatherPlan:
    """The slots that some requests of a batch attend to, padded to one length.

    Attributes:
        rows: Int64 `[n]`, places in the batch. As many of them in turn as `n` is a multiple of
            `requests` attend to the same keys.
        slots: Int64 `[requests × splits × keys]`; padding repeats the request's first slot, so
            that it always holds finite numbers.
        shape: `(requests, splits, keys)`.
        mask: Float32 `[requests, splits, 1, keys]`, -inf on padding, or with a row for each of a
            request's queries instead of the 1, -inf on what it doesn't read as well; None where
            everything is read.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    shape: tuple[int, int, int]
    mask: torch.Tensor | None
    _mask_of_heads: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def mask_of_heads(self, group: int) -> torch.Tensor | None:
        """`mask` with the rows of all `group` query heads of a KV head in turn, made once."""
        if self.mask is None or self.mask.shape[2] == 1:
            return self.mask
        if group not in self._mask_of_heads:
            self._mask_of_heads[group] = self.mask.repeat(1, 1, group, 1)
        return self._mask_of_heads[group]

    @cached_property
    def places(self) -> slice | torch.Tensor:
        """`rows` as an index: neighbours as a slice, since indexing by a tensor costs more than
        what is done with a few rows."""
        first, count = int(self.rows[0]), len(self.rows)
        neighbours = slice(first, first + count)
        return (
            neighbours if torch.equal(self.rows, torch.arange(first, first + count)) else self.rows
        )


def plan_batch(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    positions: Sequence[range],
    *,
    kv_heads: int,
    threads: int,
) -> list[GatherPlan]:
    """Group requests of similar length, so that padding never doubles the work.

    Within a group, requests keep the order of the batch: a plan alone covers the batch as it is.

    Args:
        req_to_token: `[max_requests, max_context]`, the slot of each token of a request.
        request_rows: `[requests]`, the row of `req_to_token` of each request.
        positions: The columns that each request attends to; one without keys gets no plan.
        kv_heads: KV heads that attend independently of each other.
        threads: Threads to keep busy.
    """
    lengths = [len(p) for p in positions]
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and 2 * lengths[i] > lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    work = {"kv_heads": kv_heads, "threads": threads}
    return [
        plan_group(req_to_token, request_rows, sorted(group), positions, **work) for group in groups
    ]


def plan_group(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    group: Sequence[int],
    positions: Sequence[range],
    *,
    kv_heads: int,
    threads: int,
) -> GatherPlan:
    """One plan for the requests `group` of a batch, each of which has keys.

    The other arguments are those of `plan_batch`.
    """
    own = [positions[i] for i in group]
    longest, shortest = (f(map(len, own)) for f in (max, min))
    splits = _splits(longest, shortest, len(group) * kv_heads, threads)
    keys = -(-longest // splits)
    padded = splits * keys
    rows = torch.tensor(list(group))
    steps = torch.arange(padded)
    mask = None
    if shortest < padded:
        unused = steps >= torch.tensor([len(p) for p in own])[:, None]
        steps = steps.expand(unused.shape).masked_fill(unused, 0)
        mask = torch.zeros(unused.shape).masked_fill_(unused, float("-inf"))
        mask = mask.view(len(group), splits, 1, keys)
    columns = torch.tensor([p.start for p in own])[:, None] + steps
    slots = req_to_token[request_rows[rows].long()[:, None], columns].long()
    return GatherPlan(rows, slots.flatten(), (len(group), splits, keys), mask)


def plan_shared(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    rows: torch.Tensor,
    shared: SharedRange,
    *,
    kv_heads: int,
    threads: int,
) -> GatherPlan:
    """The plan by which all of `rows` attend to what their requests share.

    Args:
        req_to_token: As in `plan_batch`.
        request_rows: As in `plan_batch`.
        rows: Int64, the places of the queries of `shared.requests`.
        shared: What to read, by any of its requests' rows.
        kv_heads: As in `plan_batch`.
        threads: As in `plan_batch`.
    """
    reader = shared.requests[0]
    plan = plan_group(
        req_to_token,
        request_rows[reader : reader + 1],
        [0],
        [range(shared.start, shared.end)],
        # Its requests' queries are work as much as heads are: the more there are, the less
        # there is to win by splitting keys.
        kv_heads=kv_heads * len(shared.requests),
        threads=threads,
    )
    return replace(plan, rows=rows)


def plan_shared_and_own(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    shared: SharedRange,
    lengths: Sequence[int],
    *,
    kv_heads: int,
    threads: int,
) -> GatherPlan:
    """The plan by which requests that decode read what they share and, behind it, their own keys.

    Each query is masked from the other requests' own keys. Products that nobody needs are cheaper
    than a second attention and a merge, as long as these keys are few.

    Args:
        req_to_token: As in `plan_batch`.
        request_rows: As in `plan_batch`.
        shared: What its requests share.
        lengths: Keys of each request of the batch; its own ones begin where `shared` ends.
        kv_heads: As in `plan_batch`.
        threads: As in `plan_batch`.
    """
    rows = torch.tensor(shared.requests)
    table_rows = request_rows[rows].tolist()
    columns = [range(shared.start, shared.end)]
    columns += [range(shared.end, lengths[i]) for i in shared.requests]
    slots = torch.cat(
        [
            req_to_token[row, own.start : own.stop]
            for row, own in zip([table_rows[0], *table_rows], columns, strict=True)
        ]
    ).long()
    common = len(columns[0])
    splits = _splits(len(slots), common, len(rows) * kv_heads, threads)
    keys = -(-len(slots) // splits)
    padding = slots[:1].expand(splits * keys - len(slots))
    mask = torch.zeros(len(rows), splits * keys)
    mask[:, common:] = float("-inf")
    start = common
    for row, own in zip(mask, columns[1:], strict=True):
        row[start : start + len(own)] = 0
        start += len(own)
    mask = mask.view(1, len(rows), splits, keys).transpose(1, 2)
    return GatherPlan(rows, torch.cat([slots, padding]), (1, splits, keys), mask)


def _splits(longest: int, shortest: int, items: int, threads: int) -> int:
    """Pieces to cut each request's keys into; every piece of every request holds a key.

    `shortest` counts the keys that a request is sure to have at its beginning.
    """
    splits = max(1, min(-(-ITEMS_PER_THREAD * threads // items), longest // MIN_SPLIT_KEYS))
    while (splits - 1) * -(-longest // splits) >= shortest:
        splits -= 1
    return splits


class GatherBuffer:
    """Memory that gathered rows are written to, kept from call to call.

    A fresh allocation of a few megabytes is returned to the system when it is freed, and the
    page faults of the next one cost several times the copy itself.

    Not thread-safe: the result of `gather` is valid until the next call.
    """

    def __init__(self) -> None:
        self._rows = torch.empty(0)

    def gather(self, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rows `slots` (int64 `[n]`) of `pool` `[size, heads, dim]`, as `[n, heads, dim]`."""
        needed = slots.shape[0]
        buffer = self._rows
        if (
            buffer.shape[0] < needed
            or buffer.shape[1:] != pool.shape[1:]
            or buffer.dtype != pool.dtype
        ):
            capacity = 1 << max(needed - 1, 0).bit_length()
            self._rows = buffer = pool.new_empty((capacity, *pool.shape[1:]))
        return torch.index_select(pool, 0, slots, out=buffer[:needed])
