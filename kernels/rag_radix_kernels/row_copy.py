"""Copying rows between tensors that both lie in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

# A run is copied by one call, rows in any order by a gather and a scatter, which cost about as
# much as that call for so many rows.
_SHORT_RUN_ROWS = 32

_Run = tuple[int, int, int]


class RowCopier:
    """Copies rows of many tensors by the same indices, whole runs at once.

    Slots that were allocated together mostly lie one after the other. The runs of the last
    indices are remembered, since a load-back asks once for each layer.
    """

    def __init__(self) -> None:
        self._indices: tuple[torch.Tensor, torch.Tensor] | None = None
        self._runs: list[_Run] | None = None

    def copy(
        self,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        source_rows: torch.Tensor,
        destination_rows: torch.Tensor,
    ) -> None:
        """Copy rows `source_rows` of each source to `destination_rows` of its destination.

        Args:
            sources: Each [rows, ...].
            destinations: As many, each of its source's shape but for the number of rows.
            source_rows: int64 [n].
            destination_rows: int64 [n], all different. Neither may be changed afterwards.
        """
        if self._indices is None or not (
            self._indices[0] is source_rows and self._indices[1] is destination_rows
        ):
            self._indices = source_rows, destination_rows
            self._runs = _runs(source_rows, destination_rows)
        for source, destination in zip(sources, destinations, strict=True):
            if self._runs is None:
                destination.index_copy_(0, destination_rows, source.index_select(0, source_rows))
                continue
            for begin, into, count in self._runs:
                destination.narrow(0, into, count).copy_(source.narrow(0, begin, count))


def _runs(source_rows: torch.Tensor, destination_rows: torch.Tensor) -> list[_Run] | None:
    """First row, row that it goes to, and length of each run; None where they are too short."""
    rows = len(source_rows)
    if rows == 0:
        return []
    breaks = (source_rows.diff() != 1) | (destination_rows.diff() != 1)
    starts = [0, *(breaks.nonzero().flatten() + 1).tolist()]
    if len(starts) * _SHORT_RUN_ROWS > rows + _SHORT_RUN_ROWS:
        return None
    first = torch.tensor(starts)
    return [
        (begin, into, end - start)
        for begin, into, (start, end) in zip(
            source_rows[first].tolist(),
            destination_rows[first].tolist(),
            pairwise([*starts, rows]),
            strict=True,
        )
    ]
