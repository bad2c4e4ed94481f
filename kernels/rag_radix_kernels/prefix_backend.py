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

from rag_radix_kernels.grouping import MIN_SAVED_KEYS, find_shared_ranges
from rag_radix_kernels.kv_gather import (
    GatherBuffer,
    GatherPlan,
    plan_batch,
    plan_group,
    plan_shared,
)
from rag_radix_kernels.options import shares_prefixes
from rag_radix_kernels.prefix_attention import extend_attention, gathered_attention, merge

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


logger = logging.getLogger(__name__)

# Keys that a shared range must save in a decode, where a further product and a merge are a large
# part of the work: with bf16 on two cores, 6,000 (four requests behind 2,000 tokens) lose 8% and
# 14,000 (eight) win 46%; in an extend 6,000 win 49%.
MIN_SAVED_KEYS_DECODE = 8192


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
        if forward_batch.forward_mode.is_decode_or_idle():
            lengths = forward_batch.seq_lens.tolist()
            new_lens = [1] * len(lengths)
            # Whoever decodes reads its newest token by itself, so nobody's own keys are none.
            own = self._plan_shared(
                table,
                table_rows,
                [n - 1 for n in lengths],
                new_lens,
                min_saved_keys=MIN_SAVED_KEYS_DECODE,
                **work,
            )
            positions = [range(start, n) for start, n in zip(own, lengths, strict=True)]
            self._decode_plans = plan_batch(table, table_rows, positions, **work)
        elif forward_batch.forward_mode.is_extend():
            lengths = forward_batch.extend_prefix_lens.tolist()
            new_lens = forward_batch.extend_seq_lens.tolist()
            own = self._plan_shared(
                table, table_rows, lengths, new_lens, min_saved_keys=MIN_SAVED_KEYS, **work
            )
            positions = [range(start, n) for start, n in zip(own, lengths, strict=True)]
            self._prefix_plans = [
                plan_group(table, table_rows, [i], positions, **work) if p else None
                for i, p in enumerate(positions)
            ]

    def _plan_shared(
        self,
        table: torch.Tensor,
        table_rows: torch.Tensor,
        lengths: Sequence[int],
        new_lens: Sequence[int],
        *,
        min_saved_keys: int,
        **work: int,
    ) -> list[int]:
        """Plan what is read once for several requests; where each one's own reading begins."""
        ranges = []
        if self._shares:
            ranges = find_shared_ranges(table, table_rows, lengths, min_saved_keys=min_saved_keys)
        if ranges and not self._has_shared:
            self._has_shared = True
            logger.info("From now on prefixes that requests share are read once for all of them.")
        own = [0] * len(lengths)
        queries = list(torch.arange(sum(new_lens)).split(list(new_lens))) if ranges else []
        self._shared_plans = []
        for shared in ranges:
            rows = torch.cat([queries[i] for i in shared.requests])
            self._shared_plans.append(plan_shared(table, table_rows, rows, shared, **work))
            for i in shared.requests:
                own[i] = shared.end
        return own

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
        query = q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        if len(self._decode_plans) == 1 and not self._shared_plans:
            gathered = self._gather(self._decode_plans[0], layer, query.dtype)
            return gathered_attention(query, *gathered, scale=layer.scaling)[0].flatten(1)
        shape = (query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        output = query.new_empty(shape, dtype=self._sum_dtype(query))
        lse = query.new_empty(shape[:2], dtype=torch.float32)
        for plan in self._decode_plans:
            attended, attended_lse = gathered_attention(
                query[plan.places], *self._gather(plan, layer, query.dtype), scale=layer.scaling
            )
            output[plan.places] = attended[:, 0].to(output.dtype)
            lse[plan.places] = attended_lse[:, 0]
        self._merge_shared(query[:, 0], output, lse, layer)
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
            shared, shared_lse = gathered_attention(
                query[rows][None], *self._gather(plan, layer, query.dtype), scale=layer.scaling
            )
            output[rows], lse[rows] = merge(output[rows], lse[rows], shared[0], shared_lse[0])

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
        return key.unflatten(0, plan.shape), value.unflatten(0, plan.shape), plan.mask

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
