"""Prefix attention against the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from rag_radix_kernels import reference
from rag_radix_kernels.kv_gather import GatherBuffer, plan_batch, plan_group
from rag_radix_kernels.prefix_attention import (
    causal_attention,
    extend_attention,
    gathered_attention,
    merge,
)

# Largest error relative to the largest output. bfloat16 keeps 8 bits (half a unit in the last
# place is 2**-9), and a value is rounded up to four times on its way: the probabilities, each
# partial result, the merged result. float32 rounds at 2**-24, but rounding a score of 16 shifts
# its probability by 2**-20, and a sum over thousands of keys adds up as many roundings.
MAX_RELATIVE_ERROR = {torch.bfloat16: 4 * 2.0**-9, torch.float32: 1e-5}
# Log-sum-exp is kept in float32 for both; with bfloat16 the scores come from a bfloat16 product
# that is summed in float32.
MAX_LSE_ERROR = {torch.bfloat16: 1e-3, torch.float32: 1e-5}

PAGE_SIZE = 16
PREFIXES = (0, 1, PAGE_SIZE - 1, PAGE_SIZE, 1500)
DTYPES = (torch.bfloat16, torch.float32)
QUERY_HEADS_AND_KV_HEADS = ((3, 3), (9, 3), (8, 1))


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def _assert_lse_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = MAX_LSE_ERROR[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=error, atol=error)


def _randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


class Pool:
    """KV rows scattered over a pool in random order, as a used server's are."""

    def __init__(
        self, lengths: Sequence[int], kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype
    ) -> None:
        size = sum(lengths) + 50
        self.keys = _randn(size, kv_heads, dim, dtype=dtype)
        self.values = _randn(size, kv_heads, value_dim, dtype=dtype)
        self.table = torch.zeros((len(lengths), max(lengths) + 1), dtype=torch.int32)
        free = torch.randperm(size)
        self.slots = list(free[: sum(lengths)].split(list(lengths)))
        for row, slots in enumerate(self.slots):
            self.table[row, : len(slots)] = slots

    def read(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[self.slots[request]], self.values[self.slots[request]]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize(("query_heads", "kv_heads"), QUERY_HEADS_AND_KV_HEADS)
@pytest.mark.parametrize("new", [1, 5, 70])
def test_extend_matches_the_reference(
    new: int, query_heads: int, kv_heads: int, dim: int, prefix: int, dtype: torch.dtype
) -> None:
    pool = Pool([prefix + new], kv_heads, dim, dim, dtype)
    key, value = pool.read(0)
    query = _randn(new, query_heads, dim, dtype=dtype)
    scale = dim**-0.5
    gathered = None
    if prefix:
        plan = plan_group(
            pool.table, torch.tensor([0]), [0], [range(prefix)], kv_heads=kv_heads, threads=2
        )
        gathered = (
            GatherBuffer().gather(pool.keys, plan.slots).unflatten(0, plan.shape),
            GatherBuffer().gather(pool.values, plan.slots).unflatten(0, plan.shape),
            plan.mask,
        )

    actual, lse = extend_attention(
        query, key[prefix:], value[prefix:], scale=scale, prefix=gathered
    )

    expected, expected_lse = reference.attention(query, key, value, scale=scale, causal_from=prefix)
    assert actual.shape == expected.shape
    _assert_lse_close(lse, expected_lse, dtype)
    assert _relative_error(actual, expected) <= MAX_RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize(("query_heads", "kv_heads"), QUERY_HEADS_AND_KV_HEADS)
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_causal_attention_and_its_lse_match_the_reference(
    tokens: int, query_heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    query = _randn(tokens, query_heads, dim, dtype=dtype)
    key, value = (_randn(tokens, kv_heads, dim, dtype=dtype) for _ in range(2))
    actual, lse = causal_attention(query, key, value, scale=0.2)
    expected, expected_lse = reference.attention(query, key, value, scale=0.2, causal_from=0)
    assert _relative_error(actual, expected) <= MAX_RELATIVE_ERROR[dtype]
    _assert_lse_close(lse, expected_lse, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize(("query_heads", "kv_heads"), QUERY_HEADS_AND_KV_HEADS)
@pytest.mark.parametrize("threads", [2, 16])
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [1500],
        [PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1],
        [7, 1500, 30, 1, 800, 1400, 2100, 29],
    ],
)
def test_ragged_decode_matches_the_reference(
    lengths: list[int],
    threads: int,
    query_heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    pool = Pool(lengths, kv_heads, dim, dim, dtype)
    query = _randn(len(lengths), 1, query_heads, dim, dtype=dtype)
    rows = torch.arange(len(lengths))
    keys, values = GatherBuffer(), GatherBuffer()
    seen = []
    positions = [range(length) for length in lengths]
    for plan in plan_batch(pool.table, rows, positions, kv_heads=kv_heads, threads=threads):
        actual, lse = gathered_attention(
            query[plan.rows],
            keys.gather(pool.keys, plan.slots).unflatten(0, plan.shape),
            values.gather(pool.values, plan.slots).unflatten(0, plan.shape),
            plan.mask,
            scale=0.2,
        )
        for row, output, row_lse in zip(plan.rows.tolist(), actual, lse, strict=True):
            seen.append(row)
            expected, expected_lse = reference.attention(query[row], *pool.read(row), scale=0.2)
            assert _relative_error(output, expected) <= MAX_RELATIVE_ERROR[dtype]
            _assert_lse_close(row_lse, expected_lse, dtype)
    assert sorted(seen) == rows.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (576, 512), (64, 128)])
def test_keys_and_values_may_differ_in_width(dim: int, value_dim: int, dtype: torch.dtype) -> None:
    pool = Pool([90], 1, dim, value_dim, dtype)
    key, value = pool.read(0)
    query = _randn(10, 4, dim, dtype=dtype)
    prefix = (key[None, None, :80], value[None, None, :80], None)
    actual, _ = extend_attention(query, key[80:], value[80:], scale=0.1, prefix=prefix)
    expected, _ = reference.attention(query, key, value, scale=0.1, causal_from=80)
    assert actual.shape == (10, 4, value_dim)
    assert _relative_error(actual, expected) <= MAX_RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_matches_the_reference_for_weights_of_any_size(dtype: torch.dtype) -> None:
    a, b = (_randn(200, 3, 32, dtype=dtype) for _ in range(2))
    lse_a, lse_b = (60 * torch.randn(200, 3) for _ in range(2))
    merged, lse = merge(a, lse_a, b, lse_b)
    assert _relative_error(merged, reference.merge(a, lse_a, b, lse_b)) <= MAX_RELATIVE_ERROR[dtype]
    _assert_lse_close(lse, torch.logaddexp(lse_a.double(), lse_b.double()), dtype)


def test_merged_parts_equal_attention_over_the_whole_in_the_reference() -> None:
    query, key, value = (torch.randn(n, 2, 16, dtype=torch.float64) for n in (4, 50, 50))
    whole, _ = reference.attention(query, key, value, scale=0.3)
    left = reference.attention(query, key[:20], value[:20], scale=0.3)
    right = reference.attention(query, key[20:], value[20:], scale=0.3)
    torch.testing.assert_close(reference.merge(*left, *right), whole)


@pytest.mark.parametrize("cached", [1, 15, 16, 100, 299])
def test_what_was_cached_changes_a_row_by_rounding_only(cached: int) -> None:
    key, value = (torch.randn(300, 3, 64) for _ in range(2))
    query = torch.randn(300, 9, 64)
    whole, _ = extend_attention(query, key, value, scale=0.125)
    part, _ = extend_attention(
        query[cached:],
        key[cached:],
        value[cached:],
        scale=0.125,
        prefix=(key[None, None, :cached], value[None, None, :cached], None),
    )
    error = _relative_error(part, whole[cached:].double())
    assert error <= MAX_RELATIVE_ERROR[torch.float32]
