"""Rows of `req_to_token` as requests on the paths of a tree have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Path = tuple[tuple[str, int], ...]


def table_of(
    paths: Sequence[Path], *, page_size: int = 1, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """`req_to_token`, rows and lengths of requests on `paths` of (node, tokens).

    Slots are handed out in pages of random order, a node's to everybody on it.
    """
    pages = torch.randperm(100_000 // page_size, generator=torch.Generator().manual_seed(seed))
    free = (pages[:, None] * page_size + torch.arange(page_size) + 1).flatten().tolist()
    slots: dict[Path, list[int]] = {}
    rows = []
    for path in paths:
        row: list[int] = []
        for depth in range(1, len(path) + 1):
            if path[:depth] not in slots:
                tokens = path[depth - 1][1]
                taken = -(-tokens // page_size) * page_size
                slots[path[:depth]] = free[:taken][:tokens]
                del free[:taken]
            row += slots[path[:depth]]
        rows.append(row)
    table = torch.zeros((len(paths) + 3, max(map(len, rows)) + 5), dtype=torch.int32)
    places = torch.arange(len(paths)).flip(0) + 2  # rows in another order than the batch's
    for place, row in zip(places, rows, strict=True):
        table[place, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return table, places, [len(row) for row in rows]
