"""SGLang on a machine without an accelerator: platform, defaults and host-tier shims.

With this platform a plain `sglang serve --model-path M` works where there is no GPU. What the
user sets wins over every default here.

SGLang's `SGLANG_PLUGINS` whitelist covers platforms too: where it is set, it has to name
`rag_radix_cpu` besides `rag_radix`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from rag_radix_kernels.row_copy import RowCopier
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from rag_radix.errors import ConfigError, IncompatibleSGLangError, UnsupportedError

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

_ACCELERATORS = ("cuda", "xpu", "npu", "mps", "hpu", "musa")
# What the device tier of the KV cache takes by default: a part of the free memory, but no more
# than what is cleared in a few seconds at start.
KV_MEMORY_FRACTION = 0.25
KV_MEMORY_LIMIT_BYTES = 8 << 30


def activate() -> str | None:
    """Name the platform class where torch sees no accelerator; None elsewhere.

    Entry point of the group `sglang.srt.platforms`.
    """
    for name in _ACCELERATORS:
        device = getattr(torch, name, None)
        if device is not None and device.is_available():
            return None
    return f"{__name__}.TorchCpuPlatform"


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU through torch's own operations, without the kernels of SGLang's CPU engine.

    Defaults for what the user leaves open:

    - `--attention-backend rag_prefix`.
    - `--hicache-io-backend direct` and `--hicache-mem-layout layer_first`, the only pair that
      works here: SGLang's defaults for the two count as left open.
    - `--max-total-tokens`: as many as fit in a quarter of the free memory, 8 GiB at most.
      SGLang would fill most of the machine, since it takes the device for its own; on a CPU
      the same memory serves the host tier, activations and every other program. It applies
      only while `--mem-fraction-static` isn't set either.
    - `--sleep-on-idle`: an idle scheduler would otherwise keep a core busy.
    - `OMP_WAIT_POLICY=passive` in the environment of the workers.
    """

    _enum = PlatformEnum.OOT
    device_name = "torch-cpu"

    def get_device(self, device_id: int = 0) -> str:
        """The device's name: unlike the mixin's `torch.device`, what server arguments hold."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "rag_prefix"

    def init_backend(self) -> None:
        """Runs in each worker, before it builds any pool."""
        from rag_radix_kernels.sglang_backend import register

        register()
        install_host_tier_shims()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open; called while SGLang resolves its arguments.

        Raises:
            ConfigError: The host tier is asked for with a transfer that needs a GPU.
            UnsupportedError: A storage backend other than `file` is asked for.
        """
        from sglang.srt.utils.common import get_free_cpu_memory

        given = server_args._raw_input
        if given["attention_backend"] is None:
            server_args.attention_backend = self.get_default_attention_backend()
        if server_args.enable_hierarchical_cache:
            _apply_host_tier_defaults(server_args)
        if given["max_total_tokens"] is None and given["mem_fraction_static"] is None:
            kv_bytes = min(get_free_cpu_memory() * KV_MEMORY_FRACTION, KV_MEMORY_LIMIT_BYTES)
            server_args.max_total_tokens = int(kv_bytes // _kv_bytes_per_token(server_args))
        server_args.sleep_on_idle = True
        # Read by the workers that are started from here. OpenMP threads that spin while they
        # wait cost a core with a busy neighbour a factor of ten and more; sleeping costs little.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _apply_host_tier_defaults(server_args: Any) -> None:
    if server_args.hicache_storage_backend not in (None, "file"):
        raise UnsupportedError(
            f"--hicache-storage-backend {server_args.hicache_storage_backend} needs transfers "
            "that exist on a GPU only; use 'file' on this machine"
        )
    for field, sglang_default, working in (
        ("hicache_io_backend", "kernel", "direct"),
        ("hicache_mem_layout", "page_first", "layer_first"),
    ):
        value = getattr(server_args, field)
        if value not in (sglang_default, working):
            flag = "--" + field.replace("_", "-")
            raise ConfigError(f"{flag} {value} needs a GPU; leave it out or use {working!r}")
        setattr(server_args, field, working)


def _kv_bytes_per_token(server_args: Any) -> int:
    """Bytes that one token takes in the KV pools of all tensor-parallel ranks."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.model_config import AttentionArch

    config: ModelConfig = model_config_of(server_args)
    ranks = server_args.tp_size
    if config.attention_arch == AttentionArch.MLA:
        elements = ranks * (config.kv_lora_rank + config.qk_rope_head_dim)
    else:
        elements = ranks * config.get_num_kv_heads(ranks) * (config.head_dim + config.v_head_dim)
    return int(elements * config.num_hidden_layers * config.dtype.itemsize)


def install_host_tier_shims() -> None:
    """Let SGLang's host pools work where the "device" is the CPU; safe to call again.

    Three things in them exist for a GPU only; two are replaced by plain torch, one is left out:

    - the host allocation, which registers the memory with CUDA;
    - pinned pages, in which a storage backend hands over what it has read;
    - `transfer_kv_direct` of the MHA and MLA pools, a compiled kernel that isn't imported on a
      CPU.

    Raises:
        IncompatibleSGLangError: SGLang's host pools don't have these places any more.
    """
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    if "cpu" not in common.ALLOC_MEMORY_FUNCS and "npu" not in common.ALLOC_MEMORY_FUNCS:
        raise IncompatibleSGLangError(
            "sglang.srt.mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS is no longer keyed by "
            "device type; install the SGLang version this release of rag-radix pins"
        )
    for module, pool in ((mha, mha.MHATokenToKVPoolHost), (mla, mla.MLATokenToKVPoolHost)):
        for method in (pool.load_to_device_per_layer, pool.backup_from_device_all_layer):
            if "transfer_kv_direct" not in method.__code__.co_names:
                raise IncompatibleSGLangError(
                    f"{method.__module__}.{method.__qualname__} no longer copies with "
                    "transfer_kv_direct; install the SGLang version this release of rag-radix "
                    "pins"
                )
        module.transfer_kv_direct = _copy_rows
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    # Without this setter, which SGLang's constructors call, it is an ordinary attribute.
    base.HostKVCache.pin_memory = property(lambda pool: False, lambda pool, value: None)


def _allocate(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: object,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """Host memory in the signature of SGLang's allocators; there is nothing to pin it for."""
    return torch.empty(dims, dtype=dtype, device=device)


def _copy_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """`transfer_kv_direct` in torch: rows `src_indices` of each layer to `dst_indices`."""
    _copier.copy(src_layers, dst_layers, src_indices, dst_indices)


_copier = RowCopier()
