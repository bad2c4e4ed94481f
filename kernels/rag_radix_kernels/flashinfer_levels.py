"""Levels of a cascade computed by FlashInfer, on CUDA."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.cascade import merge_state

from rag_radix_kernels import prefix_attention
from rag_radix_kernels.cascade import Level, State

MAX_THREADS_PER_BLOCK = 1024


class FlashInferLevels:
    """One paged attention kernel for each level of a pass, planned once for all layers."""

    def __init__(
        self, workspace: torch.Tensor, *, query_heads: int, kv_heads: int, dim: int
    ) -> None:
        """Make the first kernel's wrapper when a pass needs it.

        Args:
            workspace: Uint8 on the device, for partial results during a run; may be shared with
                whatever runs on the same stream.
            query_heads: Of every layer.
            kv_heads: Of every layer.
            dim: Of keys and of values.
        """
        self._workspace = workspace
        self._heads_and_dim = (query_heads, kv_heads, dim)
        self._wrappers: list[BatchPrefillWithPagedKVCacheWrapper] = []

    def plan(
        self, levels: Sequence[Level], *, query_dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> None:
        """Schedule the levels that `attend` then computes, for every layer alike."""
        while len(self._wrappers) < len(levels):
            self._wrappers.append(
                BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
            )
        for wrapper, level in zip(self._wrappers[: len(levels)], levels, strict=True):
            # A slot is a page of one token, whatever the allocator's pages are.
            last_page_len = torch.ones(len(level.key_starts) - 1, dtype=torch.int32)
            wrapper.plan(
                level.query_starts,
                level.key_starts,
                level.slots,
                last_page_len,
                *self._heads_and_dim,
                1,
                causal=False,
                q_data_type=query_dtype,
                kv_data_type=kv_dtype,
            )

    def attend(
        self,
        number: int,
        query: torch.Tensor,
        kv_pool: tuple[torch.Tensor, torch.Tensor],
        *,
        scale: float,
        logit_cap: float = 0.0,
        key_scale: float | None = None,
        value_scale: float | None = None,
    ) -> State:
        """Attention of one level.

        Args:
            number: Of the level, as planned.
            query: `[n, query_heads, dim]`, of the level's rows.
            kv_pool: Keys and values of a layer, `[size, kv_heads, dim]` each.
            scale: Factor on the scores before the softmax.
            logit_cap: Soft cap on the scores; 0 for none.
            key_scale: Factor on quantized keys.
            value_scale: Factor on quantized values.

        Returns:
            Output `[n, query_heads, dim]` and log-sum-exp to base 2, `[n, query_heads]`.
        """
        state: State = self._wrappers[number].forward_return_lse(
            query,
            kv_pool,
            causal=False,
            sm_scale=scale,
            logits_soft_cap=logit_cap,
            k_scale=key_scale,
            v_scale=value_scale,
        )
        return state


def merge(
    output_a: torch.Tensor, lse_a: torch.Tensor, output_b: torch.Tensor, lse_b: torch.Tensor
) -> State:
    """Attention over two disjoint key sets; log-sum-exps are to base 2."""
    _, heads, dim = output_a.shape
    # FlashInfer gives a token's heads to one block of threads, each of which has a few numbers.
    numbers_per_thread = max(16 // output_a.element_size(), dim // 32)
    if heads * dim <= MAX_THREADS_PER_BLOCK * numbers_per_thread:
        state: State = merge_state(output_a, lse_a, output_b, lse_b)
        return state
    to_e = math.log(2)
    output, lse = prefix_attention.merge(output_a, lse_a * to_e, output_b, lse_b * to_e)
    return output.to(output_a.dtype), lse / to_e
