from __future__ import annotations

import pytest
import torch
from rag_radix_kernels.row_copy import RowCopier


@pytest.mark.parametrize("run_rows", [1, 3, 32, 64])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rows_arrive_where_their_indices_say(rows, run_rows):
    generator = torch.Generator().manual_seed(rows * 100 + run_rows)
    sources = [torch.randn(200, 3, 4, generator=generator) for _ in range(4)]
    destinations = [torch.zeros(300, 3, 4) for _ in range(4)]
    source_rows = _scattered(200, rows, run_rows, generator)
    destination_rows = _scattered(300, rows, run_rows, generator)
    copier = RowCopier()
    # By layers, as a load-back does.
    for layer in range(2):
        pair = slice(2 * layer, 2 * layer + 2)
        copier.copy(sources[pair], destinations[pair], source_rows, destination_rows)
    for source, destination in zip(sources, destinations, strict=True):
        assert torch.equal(destination[destination_rows], source[source_rows])
        untouched = torch.ones(300, dtype=torch.bool)
        untouched[destination_rows] = False
        assert not destination[untouched].any()


def test_other_indices_are_looked_at_anew():
    source, destination = torch.arange(40.0).reshape(20, 2), torch.zeros(20, 2)
    copier = RowCopier()
    same = torch.arange(10)
    copier.copy([source], [destination], same, same)
    copier.copy([source], [destination], torch.arange(10, 20), same)
    assert torch.equal(destination[:10], source[10:])


def test_nothing_to_copy_copies_nothing():
    none = torch.empty(0, dtype=torch.int64)
    destination = torch.zeros(3, 2)
    RowCopier().copy([torch.ones(3, 2)], [destination], none, none)
    assert not destination.any()


def _scattered(among: int, rows: int, run_rows: int, generator: torch.Generator) -> torch.Tensor:
    """`rows` different numbers in runs of `run_rows`, the runs in any order."""
    runs = torch.randperm(among // run_rows, generator=generator)[: -(-rows // run_rows)]
    numbers = runs[:, None] * run_rows + torch.arange(run_rows)
    return numbers.flatten()[:rows]
