"""Which slots of a KV pool a forward pass reads, and reading them without fresh memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Below this many keys a further split costs more than the threads it feeds can save.
MIN_SPLIT_KEYS = 512
# Work items per thread that keep all threads busy to the end.
ITEMS_PER_THREAD = 4


@dataclass(frozen=True)
class GatherPlan:
    """The slots that some requests of a batch attend to, padded to one length.

    Attributes:
        rows: Int64 `[requests]`, the requests' places in the batch.
        slots: Int64 `[requests × splits × keys]`; padding repeats the request's first slot, so
            that it always holds finite numbers.
        shape: `(requests, splits, keys)`.
        mask: Float32 of that shape, -inf on padding; None where nothing is padded.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    shape: tuple[int, int, int]
    mask: torch.Tensor | None


def plan_batch(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    lengths: Sequence[int],
    *,
    kv_heads: int,
    threads: int,
) -> list[GatherPlan]:
    """Group requests of similar length, so that padding never doubles the work.

    Within a group, requests keep the order of the batch: a plan alone covers the batch as it is.

    Args:
        req_to_token: `[max_requests, max_context]`, the slot of each token of a request.
        request_rows: `[requests]`, the row of `req_to_token` of each request.
        lengths: Keys of each request; requests without keys get no plan.
        kv_heads: KV heads that attend independently of each other.
        threads: Threads to keep busy.
    """
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and 2 * lengths[i] > lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    work = {"kv_heads": kv_heads, "threads": threads}
    return [
        plan_group(req_to_token, request_rows, sorted(group), lengths, **work) for group in groups
    ]


def plan_group(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    group: Sequence[int],
    lengths: Sequence[int],
    *,
    kv_heads: int,
    threads: int,
) -> GatherPlan:
    """One plan for the requests `group` of a batch, each of which has keys.

    The other arguments are those of `plan_batch`.
    """
    longest, shortest = (f(lengths[i] for i in group) for f in (max, min))
    splits = _splits(longest, shortest, len(group) * kv_heads, threads)
    keys = -(-longest // splits)
    padded = splits * keys
    rows = torch.tensor(list(group))
    # A request as long as its row of the table has nothing after it to pad with.
    available = min(padded, req_to_token.shape[1])
    slots = req_to_token[request_rows[rows].long(), :available].long()
    if available < padded:
        slots = torch.cat([slots, slots[:, :1].expand(-1, padded - available)], dim=1)
    mask = None
    if shortest < padded:
        used = torch.arange(padded) < torch.tensor([lengths[i] for i in group])[:, None]
        slots = torch.where(used, slots, slots[:, :1])
        mask = torch.zeros(used.shape).masked_fill_(~used, float("-inf"))
        mask = mask.view(len(group), splits, keys)
    return GatherPlan(rows, slots.flatten(), (len(group), splits, keys), mask)


def _splits(longest: int, shortest: int, items: int, threads: int) -> int:
    """Pieces to cut each request's keys into; every piece of every request holds a key."""
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
