"""The CUDA backend's own part, with torch in place of FlashInfer's kernels and SGLang's plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rag_radix_kernels import flashinfer_backend, flashinfer_levels, prefix_attention, reference
from rag_radix_kernels.cascade import Level, State
from rag_radix_kernels.flashinfer_backend import SharedPrefixFlashInferBackend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from shared_rows import Path, table_of

HEADS, KV_HEADS, DIM = 6, 2, 16
PATHS: list[Path] = [
    (("system", 150), ("doc", 400), ("question 0", 30)),
    (("system", 150), ("doc", 400), ("question 1", 45)),
    (("alone", 90),),
    (("system", 150), ("question 2", 20)),
]
NEW_LENS = [5, 1, 20, 20]


class Pool:
    def __init__(self, slots: int) -> None:
        self.keys, self.values = (torch.randn(slots, KV_HEADS, DIM) for _ in range(2))
        self.saved = 0

    def get_kv_buffer(self, layer_id: int) -> State:
        return self.keys, self.values

    def set_kv_buffer(
        self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any
    ) -> None:
        self.saved += len(k)


class TorchLevels:
    """As `FlashInferLevels`, with log-sum-exps to base 2 as FlashInfer's are."""

    def plan(self, levels: Sequence[Level], **dtypes: torch.dtype) -> None:
        self.levels = levels

    def attend(self, number: int, query: torch.Tensor, kv_pool: State, **options: Any) -> State:
        level = self.levels[number]
        queries, keys = level.query_starts.tolist(), level.key_starts.tolist()
        parts = []
        for run in range(len(queries) - 1):
            slots = level.slots[keys[run] : keys[run + 1]].long()
            kv = (pool[slots] for pool in kv_pool)
            own = query[queries[run] : queries[run + 1]]
            parts.append(reference.attention(own, *kv, scale=options["scale"]))
        outputs, lses = zip(*parts, strict=True)
        return torch.cat(outputs).float(), torch.cat(lses).float() / math.log(2)


class Ragged:
    """Causal attention of each request's new tokens, as SGLang has FlashInfer plan it."""

    def forward_return_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> State:
        assert options["causal"]
        parts = [
            prefix_attention.causal_attention(*own, scale=options["sm_scale"])
            for own in zip(*(t.split(NEW_LENS) for t in (query, key, value)), strict=True)
        ]
        outputs, lses = zip(*parts, strict=True)
        return torch.cat(outputs), torch.cat(lses) / math.log(2)


class Setup:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.table, self.rows, self.lengths = table_of(PATHS)
        self.pool = Pool(int(self.table.max()) + 1)
        self.stock: list[str] = []
        for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
            monkeypatch.setattr(FlashInferAttnBackend, name, lambda self, *arguments: None)
        for name in ("forward_extend", "forward_decode"):
            monkeypatch.setattr(
                FlashInferAttnBackend, name, lambda *arguments, name=name: self.stock.append(name)
            )
        monkeypatch.setattr(flashinfer_levels, "MAX_THREADS_PER_BLOCK", 0)  # merge in torch
        monkeypatch.setattr(flashinfer_backend, "MIN_SAVED_KEYS", 300)
        backend = SharedPrefixFlashInferBackend.__new__(SharedPrefixFlashInferBackend)
        vars(backend).update(
            _attention=TorchLevels(),
            _dtypes={"query_dtype": torch.float32, "kv_dtype": torch.float32},
            _levels=[],
            forward_metadata=SimpleNamespace(use_ragged=True, swa_out_cache_loc=None),
            prefill_wrapper_ragged=Ragged(),
            num_wrappers=1,
            enable_deterministic=False,
            is_dllm_model=False,
            prefill_uses_dequant_workspace=False,
            decode_uses_dequant_workspace=False,
            kv_index_translator=SimpleNamespace(reads_are_translated=False),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool,
            _kv_write_scales=lambda layer: (None, None),
        )
        monkeypatch.setattr(
            flashinfer_backend.KVWriteLoc, "for_layer", lambda *arguments, **options: None
        )
        self.backend: Any = backend
        self.layer: Any = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=HEADS,
            tp_k_head_num=KV_HEADS,
            tp_v_head_num=KV_HEADS,
            head_dim=DIM,
            scaling=0.3,
            logit_cap=0.0,
            k_scale_float=None,
            v_scale_float=None,
            attn_type=AttentionType.DECODER,
        )

    def run(self, mode: ForwardMode, **changes: Any) -> torch.Tensor:
        new_lens = [1] * len(PATHS) if mode == ForwardMode.DECODE else NEW_LENS
        self.slots = [
            self.table[row, :n].long() for row, n in zip(self.rows, self.lengths, strict=True)
        ]
        pairs = list(zip(self.slots, new_lens, strict=True))
        new = torch.cat([slots[-n:] for slots, n in pairs])
        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=self.rows,
            seq_lens=torch.tensor(self.lengths),
            seq_lens_cpu=None,
            extend_prefix_lens_cpu=[len(slots) - n for slots, n in pairs],
            extend_seq_lens_cpu=new_lens,
            spec_info=None,
            encoder_lens=None,
        )
        vars(batch).update(changes)
        self.query = torch.randn(len(new), HEADS * DIM)
        self.backend.init_forward_metadata(batch)
        decodes = mode == ForwardMode.DECODE
        forward = self.backend.forward_decode if decodes else self.backend.forward_extend
        kv = self.pool.keys[new].flatten(1), self.pool.values[new].flatten(1)
        output: torch.Tensor = forward(self.query, *kv, self.layer, batch)
        return output

    def assert_right(self, actual: torch.Tensor, new_lens: list[int]) -> None:
        queries = self.query.view(-1, HEADS, DIM).split(new_lens)
        for slots, query, output in zip(self.slots, queries, actual.split(new_lens), strict=True):
            expected, _ = reference.attention(
                query,
                self.pool.keys[slots],
                self.pool.values[slots],
                scale=0.3,
                causal_from=len(slots) - len(query),
            )
            torch.testing.assert_close(output.double(), expected.flatten(1), rtol=1e-5, atol=1e-5)


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(monkeypatch)


def test_decode_is_computed_level_by_level(setup: Setup) -> None:
    setup.assert_right(setup.run(ForwardMode.DECODE), [1] * len(PATHS))
    assert len(setup.backend._levels) == 3
    assert setup.pool.saved == len(PATHS)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
def test_extend_adds_the_new_tokens_to_the_levels(setup: Setup, mode: ForwardMode) -> None:
    setup.assert_right(setup.run(mode), NEW_LENS)
    assert len(setup.backend._levels) == 3
    assert setup.pool.saved == sum(NEW_LENS)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        (ForwardMode.DECODE, {"spec_info": object()}),
        (ForwardMode.EXTEND, {"encoder_lens": [1]}),
        (ForwardMode.TARGET_VERIFY, {}),
    ],
)
def test_what_is_not_grouped_is_left_to_sglang(
    setup: Setup, mode: ForwardMode, changes: dict[str, Any]
) -> None:
    setup.run(mode, **changes)
    assert len(setup.stock) == 1
    assert setup.backend._levels == []


def test_batches_that_share_too_little_are_left_to_sglang(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_backend, "MIN_SAVED_KEYS", 10_000)
    setup.run(ForwardMode.DECODE)
    assert setup.stock == ["forward_decode"]


def test_a_batch_that_runs_as_a_cuda_graph_forgets_the_groups_before_it(setup: Setup) -> None:
    setup.run(ForwardMode.DECODE)
    setup.backend.init_forward_metadata_out_graph(SimpleNamespace())
    assert setup.backend._levels == []
