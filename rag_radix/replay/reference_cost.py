"""A reference prefill cost, so that replays can be compared without a profile."""

from __future__ import annotations

from rag_radix.cost_model import PrefillCostTable

KV_BYTES_PER_TOKEN = 131_072
"""Mistral-7B: 32 layers, 8 KV heads of 128, key and value, 2 bytes each."""
PCIE_BYTES_PER_S = 25e9
"""Host to device over PCIe 4.0 x16, as measured rather than as specified."""
LOAD_S_PER_TOKEN = KV_BYTES_PER_TOKEN / PCIE_BYTES_PER_S

_FLOPS = 65e12
_PASS_S = 0.015
_LINEAR_FLOPS_PER_TOKEN = 2 * 7.2e9
_ATTENTION_FLOPS_PER_PAIR = 4 * 32 * 4096
_GRID_TOKENS = 512
_TOP_TOKENS = 32_768


def a10g_mistral_cost_table() -> PrefillCostTable:
    """Prefill seconds of Mistral-7B on an A10G, from arithmetic; not a measurement.

    A pass takes 15 ms, about what reading the weights takes for the few tokens that share
    it with nothing; each new token 2 x 7.2e9 operations, each pair of a new token and one it
    attends to 4 x 32 layers x 4,096, at 65e12 operations a second (half of the A10G's dense
    bf16 peak). A grid of 512 tokens up to 32,768 keeps the interpolation error of the
    quadratic term below 0.3 ms.
    """

    def seconds(cached: int, new: int) -> float:
        pairs = new * (cached + new / 2)
        operations = _LINEAR_FLOPS_PER_TOKEN * new + _ATTENTION_FLOPS_PER_PAIR * pairs
        return _PASS_S + operations / _FLOPS

    grid = range(_GRID_TOKENS, _TOP_TOKENS + 1, _GRID_TOKENS)
    cached_grid, new_grid = (0, *grid), (1, *grid)
    return PrefillCostTable(
        cached_grid,
        new_grid,
        tuple(tuple(seconds(cached, new) for new in new_grid) for cached in cached_grid),
    )
