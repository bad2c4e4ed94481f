"""Plans for reading a KV pool."""

from __future__ import annotations

import pytest
import torch
from rag_radix_kernels.grouping import SharedRange
from rag_radix_kernels.kv_gather import GatherBuffer, GatherPlan, plan_batch, plan_shared_and_own


def _plans(lengths: list[int], table_width: int = 5000, threads: int = 2) -> list[GatherPlan]:
    table = torch.arange(len(lengths) * table_width, dtype=torch.int32)
    table = table.view(len(lengths), table_width)
    rows = torch.arange(len(lengths))
    positions = [range(length) for length in lengths]
    return plan_batch(table, rows, positions, kv_heads=3, threads=threads)


def test_requests_of_similar_length_share_a_plan_without_doubling_the_work() -> None:
    lengths = [100, 1000, 90, 600, 101, 5]
    plans = _plans(lengths)
    assert [sorted(p.rows.tolist()) for p in plans] == [[1, 3], [0, 2, 4], [5]]
    for plan in plans:
        used = sum(lengths[i] for i in plan.rows.tolist())
        assert plan.slots.numel() < 2 * used + plan.shape[1]


def test_a_request_without_keys_gets_no_plan() -> None:
    assert _plans([0]) == []
    assert [p.rows.tolist() for p in _plans([0, 4])] == [[1]]


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize("length", [1, 511, 1024, 1025, 4999, 5000])
def test_a_plan_reads_each_slot_once_and_pads_with_one_of_the_requests_own(
    length: int, threads: int
) -> None:
    (plan,) = _plans([length], threads=threads)
    padded = plan.slots.view(plan.shape)
    kept = torch.ones(plan.shape, dtype=torch.bool)
    if plan.mask is not None:
        kept = plan.mask[:, :, 0] == 0
        assert torch.isneginf(plan.mask[:, :, 0][~kept]).all()
    assert padded[kept].tolist() == list(range(length))
    assert set(padded[~kept].tolist()) <= {0}
    assert kept.any(dim=-1).all(), "a split without keys would have no softmax"


def test_few_kv_heads_are_split_so_that_threads_have_work() -> None:
    (plan,) = _plans([4000], threads=8)
    assert plan.shape[1] > 1
    (short,) = _plans([600], threads=8)
    assert short.shape[1] == 1


def test_every_split_of_every_request_in_a_group_holds_a_key() -> None:
    for plan in _plans([4000, 2001, 3000], threads=64):
        if plan.mask is not None:
            assert (plan.mask == 0).any(dim=-1).all()


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize("own", [(1, 1), (3, 40, 1), (700, 2)])
def test_requests_that_share_read_what_is_shared_and_their_own_keys_alone(
    own: tuple[int, ...], threads: int
) -> None:
    shared = SharedRange(tuple(range(1, len(own) + 1)), 0, 1500)
    slots = torch.arange((1 + len(own)) * 3000).view(-1, 3000).int()
    slots[1:, :1500] = slots[1, :1500]
    lengths = [3000, *(1500 + n for n in own)]
    rows = torch.arange(len(lengths))
    plan = plan_shared_and_own(slots, rows, shared, lengths, kv_heads=3, threads=threads)
    assert plan.rows.tolist() == list(shared.requests)
    assert plan.mask is not None
    assert (plan.mask == 0).any(dim=-1).all(), "a split without keys would have no softmax"
    for row, mask in zip(plan.rows.tolist(), plan.mask[0].unbind(1), strict=True):
        read = plan.slots.view(plan.shape)[0][mask == 0]
        assert read.tolist() == slots[row, : lengths[row]].tolist()
    folded = plan.mask_of_heads(2)
    assert folded is not None
    assert torch.equal(folded[:, :, : len(own)], folded[:, :, len(own) :])


def test_a_buffer_serves_pools_of_other_shapes_and_dtypes() -> None:
    buffer = GatherBuffer()
    slots = torch.tensor([3, 1, 1])
    for pool in (
        torch.randn(9, 2, 4),
        torch.randn(9, 2, 4).bfloat16(),
        torch.randn(9, 1, 8),
        torch.randn(9, 1, 8).to(torch.float8_e4m3fn),
    ):
        expected = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
        actual = buffer.gather(pool, slots)
        actual = actual.view(torch.uint8) if pool.dtype.itemsize == 1 else actual
        assert torch.equal(actual, expected[slots])


def test_a_gather_reuses_memory() -> None:
    buffer = GatherBuffer()
    pool = torch.randn(50, 2, 4)
    first = buffer.gather(pool, torch.arange(40)).data_ptr()
    assert buffer.gather(pool, torch.arange(10)).data_ptr() == first
