"""The backend class over SGLang's own pools, layers and batches, without a server."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rag_radix_kernels import reference, sglang_backend
from rag_radix_kernels.options import SHARED_PREFIX
from rag_radix_kernels.prefix_backend import PrefixAttnBackend
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

MAX_RELATIVE_ERROR = 1e-5  # float32; see test_prefix_attention
PREFIX_LENS = (0, 70, 1, 16)
NEW_LENS = (5, 1, 30, 2)
QUERY_HEADS = 6
EXTEND_PARAMETERS = ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"]


@pytest.fixture(autouse=True)
def _single_rank() -> Any:
    torch.manual_seed(0)
    with get_parallel().override(attn_tp_size=1):
        yield


class Setup:
    """A pool that holds some requests, and a batch over it."""

    def __init__(
        self,
        *,
        mla: bool = False,
        prefix_lens: tuple[int, ...] = PREFIX_LENS,
        **layer_options: Any,
    ) -> None:
        lengths = [p + n for p, n in zip(prefix_lens, NEW_LENS, strict=True)]
        size = sum(lengths) + 20
        self.kv_heads, self.dim, self.value_dim = (1, 40, 32) if mla else (2, 32, 32)
        if mla:
            pool = MLATokenToKVPool(size, 1, torch.float32, 32, 8, 1, "cpu", False)
            rows = torch.randn(size + 1, 1, 40)
            pool.kv_buffer[0].copy_(rows)
            self.keys, self.values = rows, rows[..., :32]
        else:
            pool = MHATokenToKVPool(size, 1, torch.float32, 2, 32, 1, "cpu", False)
            self.keys, self.values = (torch.randn(size + 1, 2, 32) for _ in range(2))
            pool.k_buffer[0].copy_(self.keys)
            pool.v_buffer[0].copy_(self.values)
        table = torch.zeros((len(lengths) + 1, max(lengths)), dtype=torch.int32)
        free = torch.randperm(size) + 1
        self.slots = list(free[: sum(lengths)].split(lengths))
        for request, slots in enumerate(self.slots):
            table[request + 1, : len(slots)] = slots
        self.runner = SimpleNamespace(
            device="cpu",
            model=torch.nn.Module(),
            model_config=SimpleNamespace(
                get_num_kv_heads=lambda ranks: self.kv_heads // ranks, has_attention_sinks=False
            ),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool=pool,
        )
        self.layer = RadixAttention(
            QUERY_HEADS,
            self.dim,
            scaling=0.2,
            num_kv_heads=self.kv_heads,
            layer_id=0,
            v_head_dim=self.value_dim,
            **layer_options,
        )
        self.batch: Any = SimpleNamespace(
            req_pool_indices=torch.arange(len(lengths)) + 1,
            seq_lens=torch.tensor(lengths),
            encoder_lens=None,
        )

    def extend(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.batch.forward_mode = ForwardMode.EXTEND
        self.batch.extend_prefix_lens = torch.tensor(PREFIX_LENS)
        self.batch.extend_seq_lens = torch.tensor(NEW_LENS)
        new = torch.cat([s[p:] for s, p in zip(self.slots, PREFIX_LENS, strict=True)])
        self.batch.out_cache_loc = new
        return torch.randn(len(new), QUERY_HEADS * self.dim), self.keys[new], self.values[new]

    def decode(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.batch.forward_mode = ForwardMode.DECODE
        new = torch.stack([slots[-1] for slots in self.slots])
        self.batch.out_cache_loc = new
        return torch.randn(len(new), QUERY_HEADS * self.dim), self.keys[new], self.values[new]

    def expected(self, query: torch.Tensor, new_lens: tuple[int, ...]) -> torch.Tensor:
        outputs = []
        rows = query.view(-1, QUERY_HEADS, self.dim).split(list(new_lens))
        for slots, new in zip(self.slots, rows, strict=True):
            output, _ = reference.attention(
                new,
                self.keys[slots],
                self.values[slots],
                scale=0.2,
                causal_from=len(slots) - len(new),
            )
            outputs.append(output.flatten(1))
        return torch.cat(outputs)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("kv_given", [True, False])
def test_extend_over_a_real_pool_matches_the_reference(mla: bool, kv_given: bool) -> None:
    setup = Setup(mla=mla)
    query, key, value = setup.extend()
    backend = PrefixAttnBackend(setup.runner)
    backend.init_forward_metadata(setup.batch)
    kv = (key, value) if kv_given else (None, None)
    actual = backend.forward_extend(query, *kv, setup.layer, setup.batch, save_kv_cache=False)
    _assert_close(actual, setup.expected(query, NEW_LENS))


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("prefix_lens", [(0, 70, 1, 16), (40, 70, 20, 60)])
def test_decode_over_a_real_pool_matches_the_reference(
    mla: bool, prefix_lens: tuple[int, ...]
) -> None:
    setup = Setup(mla=mla, prefix_lens=prefix_lens)
    query, key, value = setup.decode()
    backend = PrefixAttnBackend(setup.runner)
    backend.init_forward_metadata(setup.batch)
    actual = backend.forward_decode(
        query, key, value, setup.layer, setup.batch, save_kv_cache=False
    )
    _assert_close(actual, setup.expected(query, (1,) * len(NEW_LENS)))


@pytest.mark.parametrize("options", [{"sliding_window_size": 8}])
def test_what_is_not_covered_gives_what_torch_native_gives(options: dict[str, Any]) -> None:
    setup = Setup(**options)
    query, key, value = setup.extend()
    outputs = []
    for backend in (PrefixAttnBackend(setup.runner), TorchNativeAttnBackend(setup.runner)):
        backend.init_forward_metadata(setup.batch)
        outputs.append(
            backend.forward_extend(query, key, value, setup.layer, setup.batch, save_kv_cache=False)
        )
    assert torch.equal(*outputs)


def test_other_devices_than_cpu_and_cuda_are_refused_by_name() -> None:
    runner = SimpleNamespace(device="xpu")
    with pytest.raises(ValueError, match=r"rag_prefix runs on CPU and CUDA only.*'xpu'"):
        sglang_backend.create(runner)


def _cuda_runner(*, mla: bool, speculative: bool) -> Any:
    return SimpleNamespace(
        device="cuda",
        model_config=SimpleNamespace(has_attention_sinks=False),
        use_mla_backend=mla,
        spec_algorithm=SimpleNamespace(is_some=lambda: speculative),
    )


@pytest.mark.parametrize(
    ("switch", "mla", "speculative"),
    [("", False, False), ("0", False, False), ("1", True, False), ("1", False, True)],
)
def test_on_cuda_sglangs_flashinfer_serves_what_is_not_grouped(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    switch: str,
    mla: bool,
    speculative: bool,
) -> None:
    monkeypatch.setenv(SHARED_PREFIX, switch)
    monkeypatch.setattr(sglang_backend, "create_flashinfer_backend", lambda runner: "stock")
    runner = _cuda_runner(mla=mla, speculative=speculative)
    assert sglang_backend.create(runner) == "stock"
    assert ("has no effect" in caplog.text) == (mla or speculative)


def test_the_name_flashinfer_is_ours_only_where_prefixes_are_to_be_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer", "stock")
    sglang_backend.register()
    assert ATTENTION_BACKENDS["flashinfer"] == "stock"
    monkeypatch.setenv(SHARED_PREFIX, "1")
    sglang_backend.register()
    assert ATTENTION_BACKENDS["flashinfer"] is sglang_backend.create_on_cuda


def test_sglangs_flashinfer_backend_has_what_its_subclass_builds_on() -> None:
    for method, parameters in {
        "init_forward_metadata": ["self", "forward_batch"],
        "init_forward_metadata_out_graph": ["self", "forward_batch", "in_capture"],
        "_check_kv_attention_access": ["self", "phase", "access"],
        "_kv_write_scales": ["self", "layer"],
        "forward_extend": EXTEND_PARAMETERS,
        "forward_decode": EXTEND_PARAMETERS,
    }.items():
        signature = inspect.signature(getattr(FlashInferAttnBackend, method))
        assert list(signature.parameters) == parameters, method
    source = inspect.getsource(FlashInferAttnBackend.__init__)
    for attribute in (
        "prefill_kv_access",
        "decode_kv_access",
        "indices_updater_prefill",
        "prefill_wrapper_ragged",
        "workspace_buffer",
        "num_wrappers",
        "enable_deterministic",
        "is_dllm_model",
        "prefill_uses_dequant_workspace",
        "decode_uses_dequant_workspace",
        "kv_index_translator",
    ):
        assert f"self.{attribute} = " in source, attribute


def test_models_that_torch_native_would_get_wrong_are_refused_by_name() -> None:
    setup = Setup(logit_cap=30.0)
    setup.runner.model = torch.nn.ModuleList([setup.layer])
    with pytest.raises(ValueError, match="logit soft-capping"):
        sglang_backend.create(setup.runner)
    setup.runner.model_config.has_attention_sinks = True
    with pytest.raises(ValueError, match="attention sinks"):
        sglang_backend.create(setup.runner)


def test_registering_twice_adds_one_choice() -> None:
    for _ in range(2):
        sglang_backend.register()
    assert ATTENTION_BACKEND_CHOICES.count("rag_prefix") == 1
    assert ATTENTION_BACKENDS["rag_prefix"] is sglang_backend.create
