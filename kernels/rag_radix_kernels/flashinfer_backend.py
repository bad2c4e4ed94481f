"""SGLang's FlashInfer backend with shared prefixes read once for a batch.

Grouped are decode and plain extend of MHA and GQA models, outside CUDA graphs: a graph replays
kernels of fixed shapes, and groups change from pass to pass, so a batch that runs as a graph takes
SGLang's path. So do speculative decoding, sliding windows, encoders, quantized pools that are read
through a workspace, deterministic inference and images.

A pass that may be grouped waits for the device once, to read a few slots of each row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from rag_radix_kernels.cascade import Level, State, plan_levels, run_levels
from rag_radix_kernels.grouping import find_shared_ranges

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# As much as a GPU reads in the time of a further level's half a dozen kernel launches, by
# arithmetic (some 50 µs, 4 KiB a key and layer, 3 TB/s); `scripts/gpu_check` times it.
MIN_SAVED_KEYS = 32768


class SharedPrefixFlashInferBackend(FlashInferAttnBackend):
    """FlashInfer's kernels level by level where requests share a prefix, else as SGLang has it."""

    def __init__(self, model_runner: ModelRunner, *, init_new_workspace: bool = False) -> None:
        from rag_radix_kernels.flashinfer_levels import FlashInferLevels

        super().__init__(model_runner, init_new_workspace=init_new_workspace)
        # The base class checks this for itself alone, not for a subclass.
        self._check_kv_attention_access("prefill", self.prefill_kv_access)
        self._check_kv_attention_access("decode", self.decode_kv_access)
        updater = self.indices_updater_prefill
        self._dtypes = {"query_dtype": updater.q_data_type, "kv_dtype": updater.data_type}
        self._attention = FlashInferLevels(
            self.workspace_buffer,
            query_heads=updater.num_qo_heads,
            kv_heads=updater.num_kv_heads,
            dim=updater.head_dim,
        )
        self._levels: list[Level] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the pass as SGLang does, and by levels where requests share a prefix."""
        super().init_forward_metadata(forward_batch)
        self._levels = self._plan_levels(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Plan a pass that is captured or replayed as a CUDA graph: without groups."""
        self._levels = []
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def _plan_levels(self, forward_batch: ForwardBatch) -> list[Level]:
        if not self._can_group(forward_batch):
            return []
        if forward_batch.forward_mode == ForwardMode.DECODE:
            lengths = _numbers(forward_batch.seq_lens_cpu, forward_batch.seq_lens)
            new_lens = [1] * len(lengths)
            cached = [n - 1 for n in lengths]
        else:
            lengths = list(forward_batch.extend_prefix_lens_cpu)
            new_lens = list(forward_batch.extend_seq_lens_cpu)
            cached = lengths
        table = self.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices
        ranges = find_shared_ranges(table, rows, cached, min_saved_keys=MIN_SAVED_KEYS)
        if not ranges:
            return []
        levels = plan_levels(table, rows, ranges, lengths, new_lens)
        self._attention.plan(levels, **self._dtypes)
        return levels

    def _can_group(self, forward_batch: ForwardBatch) -> bool:
        mode = forward_batch.forward_mode
        is_decode = mode == ForwardMode.DECODE
        return (
            (is_decode or mode in (ForwardMode.EXTEND, ForwardMode.MIXED))
            and (is_decode or self.forward_metadata.use_ragged)
            and forward_batch.spec_info is None
            and forward_batch.encoder_lens is None
            and self.num_wrappers == 1
            and not self.enable_deterministic
            and not self.is_dllm_model
            and not self.prefill_uses_dequant_workspace
            and not self.decode_uses_dequant_workspace
            # Pools that give a layer other slots than the rows name.
            and not self.kv_index_translator.reads_are_translated
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
        """Attention of new tokens to each other, and level by level to what is cached.

        Arguments and result are those of `PrefixAttnBackend.forward_extend`.
        """
        if k is None or v is None or not self._is_grouped(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        query = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
        new_tokens: State = self.prefill_wrapper_ragged.forward_return_lse(
            query,
            k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_v_head_num, layer.head_dim),
            causal=True,
            sm_scale=layer.scaling,
            logits_soft_cap=layer.logit_cap,
        )
        output = self._run_levels(query, layer, new_tokens)
        if save_kv_cache:
            self._save(k, v, layer, forward_batch)
        return output

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
        if not self._is_grouped(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        if k is not None and save_kv_cache:
            self._save(k, v, layer, forward_batch)
        query = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
        return self._run_levels(query, layer, None)

    def _is_grouped(self, layer: RadixAttention) -> bool:
        return bool(self._levels) and layer.attn_type == AttentionType.DECODER

    def _run_levels(
        self, query: torch.Tensor, layer: RadixAttention, state: State | None
    ) -> torch.Tensor:
        from rag_radix_kernels.flashinfer_levels import merge

        attend = partial(
            self._attention.attend,
            kv_pool=self.token_to_kv_pool.get_kv_buffer(layer.layer_id),
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            key_scale=layer.k_scale_float,
            value_scale=layer.v_scale_float,
        )
        return run_levels(query, self._levels, attend, merge, state).flatten(1)

    def _save(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        location = KVWriteLoc.for_layer(
            forward_batch, layer, swa_loc=self.forward_metadata.swa_out_cache_loc
        )
        scales = self._kv_write_scales(layer)
        self.token_to_kv_pool.set_kv_buffer(layer, location, k, v, *scales)


def _numbers(on_host: torch.Tensor | None, on_device: torch.Tensor) -> list[int]:
    numbers: list[int] = (on_device if on_host is None else on_host).tolist()
    return numbers
