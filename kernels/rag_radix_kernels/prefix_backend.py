"""The class behind the SGLang attention backend `rag_prefix`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from rag_radix_kernels.kv_gather import GatherBuffer, GatherPlan, plan_batch, plan_group
from rag_radix_kernels.prefix_attention import extend_attention, gathered_attention

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class PrefixAttnBackend(TorchNativeAttnBackend):
    """Attention over MHA, GQA and MLA pools on CPU; the rest is left to `torch_native`."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        config = model_runner.model_config
        self._is_mla = isinstance(self.token_to_kv_pool, MLATokenToKVPool)
        self._kv_heads = 1 if self._is_mla else config.get_num_kv_heads(get_parallel().attn_tp_size)
        self._key_buffer, self._value_buffer = GatherBuffer(), GatherBuffer()
        self._decode_plans: list[GatherPlan] = []
        # One for each request of an extend; None for a request without a cached prefix.
        self._prefix_plans: list[GatherPlan | None] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Look up the slots to read, once per forward pass for all layers."""
        super().init_forward_metadata(forward_batch)
        table = self.req_to_token_pool.req_to_token
        table_rows = forward_batch.req_pool_indices
        work = {"kv_heads": self._kv_heads, "threads": torch.get_num_threads()}
        if forward_batch.forward_mode.is_decode_or_idle():
            lengths = forward_batch.seq_lens.tolist()
            self._decode_plans = plan_batch(table, table_rows, lengths, **work)
        elif forward_batch.forward_mode.is_extend():
            lengths = forward_batch.extend_prefix_lens.tolist()
            self._prefix_plans = [
                plan_group(table, table_rows, [i], lengths, **work) if length else None
                for i, length in enumerate(lengths)
            ]

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
        outputs = []
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
            outputs.append(extend_attention(query[rows], *own, scale=layer.scaling, prefix=prefix))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.flatten(1)

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
        if len(self._decode_plans) == 1:
            gathered = self._gather(self._decode_plans[0], layer, query.dtype)
            return gathered_attention(query, *gathered, scale=layer.scaling)[0].flatten(1)
        output = query.new_empty((query.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        for plan in self._decode_plans:
            attended, _ = gathered_attention(
                query[plan.rows], *self._gather(plan, layer, query.dtype), scale=layer.scaling
            )
            output[plan.rows] = attended[:, 0]
        return output.flatten(1)

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
