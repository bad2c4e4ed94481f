"""The class behind the SGLang attention backend `rag_prefix`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from rag_radix_kernels.grouping import SharedRange, find_own_starts, find_shared_ranges
from rag_radix_kernels.kv_gather import (
    GatherBuffer,
    GatherPlan,
    plan_batch,
    plan_group,
    plan_shared,
    plan_shared_and_own,
)
from rag_radix_kernels.options import shares_prefixes
from rag_radix_kernels.prefix_attention import extend_attention, gathered_attention, merge

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


logger = logging.getLogger(__name__)

# Queries times keys of their own that one attention takes in although most of them are masked: a
# second attention and a merge cost two threads as much.
MAX_MASKED_PRODUCTS = 8192


class PrefixAttnBackend(TorchNativeAttnBackend):
    """Attention over MHA, GQA and MLA pools on CPU; the rest is left to `torch_native`."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        config = model_runner.model_config
        self._is_mla = isinstance(self.token_to_kv_pool, MLATokenToKVPool)
        self._kv_heads = 1 if self._is_mla else config.get_num_kv_heads(get_parallel().attn_tp_size)
        self._key_buffer, self._value_buffer = GatherBuffer(), GatherBuffer()
        self._shares = shares_prefixes(default=True)
        self._decode_plans: list[GatherPlan] = []
        # One for each request of an extend; None for a request without a cached prefix of its own.
        self._prefix_plans: list[GatherPlan | None] = []
        self._shared_plans: list[GatherPlan] = []
        self._has_shared = False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Look up the slots to read, once per forward pass for all layers."""
        super().init_forward_metadata(forward_batch)
        table = self.req_to_token_pool.req_to_token
        table_rows = forward_batch.req_pool_indices
        work = {"kv_heads": self._kv_heads, "threads": torch.get_num_threads()}
        self._shared_plans = []
        if forward_batch.forward_mode.is_decode_or_idle():
            lengths = forward_batch.seq_lens.tolist()
            # Whoever decodes reads its newest token by itself, so nobody's own keys are none.
            ranges = self._find_shared(table, table_rows, [n - 1 for n in lengths])
            own_starts = find_own_starts(ranges, len(lengths))
            self._decode_plans = []
            for shared in ranges:
                if self._reads_own_keys_as_well(shared, own_starts, lengths):
                    plan = plan_shared_and_own(table, table_rows, shared, lengths, **work)
                    self._decode_plans.append(plan)
                    for i in shared.requests:
                        own_starts[i] = lengths[i]
                else:
                    rows = torch.tensor(shared.requests)
                    plan = plan_shared(table, table_rows, rows, shared, **work)
                    self._shared_plans.append(plan)
            positions = [range(start, n) for start, n in zip(own_starts, lengths, strict=True)]
            self._decode_plans += plan_batch(table, table_rows, positions, **work)
        elif forward_batch.forward_mode.is_extend():
            lengths = forward_batch.extend_prefix_lens.tolist()
            new_lens = forward_batch.extend_seq_lens.tolist()
            ranges = self._find_shared(table, table_rows, lengths)
            queries = list(torch.arange(sum(new_lens)).split(new_lens)) if ranges else []
            for shared in ranges:
                rows = torch.cat([queries[i] for i in shared.requests])
                self._shared_plans.append(plan_shared(table, table_rows, rows, shared, **work))
            own_starts = find_own_starts(ranges, len(lengths))
            positions = [range(start, n) for start, n in zip(own_starts, lengths, strict=True)]
            self._prefix_plans = [
                plan_group(table, table_rows, [i], positions, **work) if p else None
                for i, p in enumerate(positions)
            ]

    def _find_shared(
        self, table: torch.Tensor, table_rows: torch.Tensor, lengths: Sequence[int]
    ) -> list[SharedRange]:
        """What is to be read once for several requests."""
        if not self._shares:
            return []
        ranges = find_shared_ranges(table, table_rows, lengths)
        if ranges and not self._has_shared:
            self._has_shared = True
            logger.info("From now on prefixes that requests share are read once for all of them.")
        return ranges

    def _reads_own_keys_as_well(
        self, shared: SharedRange, own_starts: Sequence[int], lengths: Sequence[int]
    ) -> bool:
        """Whether one attention does for all that its requests read from there on."""
        own_keys = sum(lengths[i] - shared.end for i in shared.requests)
        return (
            all(own_starts[i] == shared.end for i in shared.requests)
            and len(shared.requests) * own_keys <= MAX_MASKED_PRODUCTS
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attention of new tokens over their cached prefix and themselves.

        Args:
            q: `[tokens, query_heads × dim]`, the new tokens of all requests in turn.
            k: `[tokens, kv_heads, dim]`; None where the layer reads another layer's KV.
            v: `[tokens, kv_heads, value_dim]`, or None as well.
            layer: Names the pool's layer and the scale.
            forward_batch: The batch that `init_forward_metadata` saw.
            save_kv_cache: Whether to write `k` and `v` to the pool.

        Returns:
            `[tokens, query_heads × value_dim]`.
        """
        if _is_torch_native(layer, forward_batch):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        outputs, lses = [], []
        start = 0
        new_lens = forward_batch.extend_seq_lens.tolist()
        for new, plan in zip(new_lens, self._prefix_plans, strict=True):
            rows = slice(start, start + new)
            start += new
            if k is not None and v is not None and k.dtype == self.token_to_kv_pool.dtype:
                own = k[rows], v[rows]
            else:
                # What the pool holds differs from `k` (a narrower dtype): read it back, so
                # that a token looks the same to its own request and to later ones.
                key, value = self._read(layer, forward_batch.out_cache_loc[rows], query.dtype)
                own = key.clone(), value.clone()
            prefix = None if plan is None else self._gather(plan, layer, query.dtype)
            output, lse = extend_attention(query[rows], *own, scale=layer.scaling, prefix=prefix)
            outputs.append(output)
            lses.append(lse)
        sums = [output.to(self._sum_dtype(query)) for output in outputs]
        output = sums[0] if len(sums) == 1 else torch.cat(sums)
        if self._shared_plans:
            self._merge_shared(query, output, torch.cat(lses), layer)
        return output.to(query.dtype).flatten(1)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attention of one new token per request; arguments as in `forward_extend`."""
        if _is_torch_native(layer, forward_batch):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if len(self._decode_plans) == 1 and not self._shared_plans:
            return self._attend(self._decode_plans[0], query, layer)[0].flatten(1)
        shape = (query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        output = query.new_empty(shape, dtype=self._sum_dtype(query))
        lse = query.new_empty(shape[:2], dtype=torch.float32)
        for plan in self._decode_plans:
            attended, lse[plan.places] = self._attend(plan, query, layer)
            output[plan.places] = attended.to(output.dtype)
        self._merge_shared(query, output, lse, layer)
        return output.to(query.dtype).flatten(1)

    def _sum_dtype(self, query: torch.Tensor) -> torch.dtype:
        """Of outputs that are still to be merged with what is shared."""
        return torch.float32 if self._shared_plans else query.dtype

    def _merge_shared(
        self, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, layer: RadixAttention
    ) -> None:
        """Add to `output` and `lse`, in place, attention to what is read once for several.

        Args:
            query: `[rows, query_heads, dim]`.
            output: Float32 `[rows, query_heads, value_dim]`, attention to what each reads alone.
            lse: `[rows, query_heads]`, log-sum-exp of its scores.
            layer: As in `forward_extend`.
        """
        for plan in self._shared_plans:
            rows = plan.places
            shared = self._attend(plan, query, layer)
            output[rows], lse[rows] = merge(output[rows], lse[rows], *shared)

    def _attend(
        self, plan: GatherPlan, query: torch.Tensor, layer: RadixAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the plan's rows of `query` `[rows, query_heads, dim]` to its keys."""
        rows = query[plan.places].unflatten(0, (plan.shape[0], -1))
        output, lse = gathered_attention(
            rows, *self._gather(plan, layer, query.dtype), scale=layer.scaling
        )
        return output.flatten(0, 1), lse.flatten(0, 1)

    def _save(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> None:
        if save_kv_cache and k is not None and v is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)

    def _gather(
        self, plan: GatherPlan, layer: RadixAttention, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        key, value = self._read(layer, plan.slots, dtype)
        mask = plan.mask_of_heads(layer.tp_q_head_num // key.shape[1])
        return key.unflatten(0, plan.shape), value.unflatten(0, plan.shape), mask

    def _read(
        self, layer: RadixAttention, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots`, valid until the next read."""
        key_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        key = self._key_buffer.gather(key_pool, slots).to(dtype)
        if self._is_mla:  # a value is the head of its latent key
            return key, key[..., : layer.v_head_dim]
        value_pool = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        return key, self._value_buffer.gather(value_pool, slots).to(dtype)


def _is_torch_native(layer: RadixAttention, forward_batch: ForwardBatch) -> bool:
    return (
        layer.is_cross_attention
        or layer.attn_type != AttentionType.DECODER
        or layer.sliding_window_size > -1
        or forward_batch.encoder_lens is not None
    )
