"""Everything rag-radix relies on inside SGLang, and the check that it is still there."""

from __future__ import annotations

import importlib
import inspect
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.managers.cache_controller import CacheOperation, HiCacheAck
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    DecLockRefParams,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache, register_radix_cache_backend
from sglang.srt.mem_cache.unified_cache.cache_action import (
    BackupKV,
    FreeComponentDeviceSlot,
    FreeDeviceKV,
)
from sglang.srt.mem_cache.unified_cache.components import (
    ComponentData,
    ComponentType,
    FullComponent,
    get_and_increase_time_counter,
)
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import (
    UnifiedTreeCore,
    UnifiedTreeNode,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import DriveHostEvictionResult
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.unified_radix_cache import _OngoingWriteThrough as OngoingCopy
from sglang.srt.mem_cache.utils import compute_node_hash_values
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from rag_radix.errors import IncompatibleSGLangError

__all__ = [
    "SGLANG_VERSION",
    "BackupKV",
    "CacheOperation",
    "CacheRequestHandle",
    "ComponentData",
    "ComponentType",
    "DecLockRefParams",
    "DecLockRefResult",
    "DriveHostEvictionResult",
    "EvictResult",
    "FreeComponentDeviceSlot",
    "FreeDeviceKV",
    "FullComponent",
    "HiCacheAck",
    "HiCacheStorage",
    "HostKVCache",
    "IncLockRefResult",
    "MatchPrefixParams",
    "MatchResult",
    "OngoingCopy",
    "RadixKey",
    "StorageMedium",
    "TreeLock",
    "UnifiedRadixCache",
    "UnifiedTreeCore",
    "UnifiedTreeNode",
    "abort_dispatched",
    "accelerator_name",
    "check_sglang",
    "compute_node_hash_values",
    "create_unified_radix_cache",
    "device_bytes_per_token",
    "dtype_name",
    "is_answered_with_error",
    "is_finished_unaborted",
    "rank_consensus",
    "register_radix_cache_backend",
    "register_tree_core_backend",
    "registered_tree_core_backends",
    "storage_directory",
    "surface_problems",
    "time_counter",
    "use_verified_files",
    "using_all_memory",
]

SGLANG_VERSION = "0.5.23"

_NO_PROMPT = array("q", [0])

# What our subclasses override or call, with the parameters they rely on.
_SURFACE: dict[str, tuple[str, ...]] = {
    "sglang.srt.mem_cache.registry:create_unified_radix_cache": ("ctx", "cache_class"),
    "sglang.srt.mem_cache.registry:register_radix_cache_backend": ("name", "factory"),
    "sglang.srt.mem_cache.unified_cache.tree_core_registry:register_tree_core_backend": (
        "name",
        "factory",
    ),
    **{
        f"sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.{name}": parameters
        for name, parameters in {
            "__init__": ("self", "params"),
            "init_hicache": ("self", "server_args", "params"),
            "match_prefix": ("self", "params"),
            "checkpoint_into_tree": ("self", "req", "up_to", "kwargs"),
            "on_release": ("self", "req", "checkpointed"),
            "sanity_check": ("self",),
            "check_hicache_events": ("self",),
            "_reset_full": ("self",),
            "_apply_eviction_result": ("self", "result"),
            "_apply_cache_action": ("self", "action"),
            "evict": ("self", "params"),
            "evict_for_alloc": ("self", "params", "allocation_reclaim_satisfied"),
            "_evict_components": (
                "self",
                "request_by_type",
                "tracker",
                "available_size_targets",
                "allocation_reclaim_satisfied",
            ),
            "_execute_and_commit_kv_backup": ("self", "action", "write_back"),
            "writing_check": ("self", "write_back", "finish_count"),
            "loading_check": ("self", "finish_count"),
            "_count_ready_acks": ("self", "ack_queue"),
            "attach_storage_backend": (
                "self",
                "storage_backend",
                "storage_backend_extra_config_json",
                "served_model_name",
                "hicache_storage_prefetch_policy",
                "hicache_write_policy",
            ),
            "detach_storage_backend": ("self",),
            "clear_storage_backend": ("self",),
            "release_host_resources": ("self",),
            "is_backuped": ("self", "node_id"),
            "write_backup_storage": ("self", "node_id"),
            "_handle_prefetch_result": ("self", "operation"),
            "release_aborted_request": ("self", "request"),
            "drain_storage_control_queues": ("self",),
            "prefetch_from_storage": (
                "self",
                "request",
                "last_host_node_id",
                "new_input_tokens",
                "last_hash",
                "prefix_keys",
                "matched_prefix_tokens",
                "extra_key",
                "cache_salt",
                "storage_hit_end",
            ),
            "pop_prefetch_loaded_span": ("self", "request"),
            "finish_storage_prefetch_admission": ("self", "request", "fulfilled_tokens", "reason"),
            "get_last_hash_value": ("self", "node_id"),
            "_all_reduce_attn_groups": ("self", "tensor", "op"),
        }.items()
    },
    "sglang.srt.mem_cache.events:KVCacheEventRecorder.record_remove": ("self", "node", "medium"),
    "sglang.srt.mem_cache.events:KVCacheEventRecorder.record_store": (
        "self",
        "node",
        "medium",
        "session_id",
    ),
    "sglang.srt.mem_cache.utils:compute_node_hash_values": ("node", "page_size"),
    **{
        f"sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore.{name}": parameters
        for name, parameters in {
            "__init__": ("self", "params", "components"),
            "reset": ("self",),
            "_new_node": ("self", "priority"),
            "_register_node": ("self", "node"),
            "_split_node": ("self", "key", "child", "split_len"),
            "_add_new_node": (
                "self",
                "parent",
                "key",
                "value",
                "priority",
                "session_id",
                "rotation_base",
            ),
            "_update_evictable_leaf_sets": ("self", "node"),
            "_update_duplicate_tracking": ("self", "node"),
            "_can_reclaim_full_host_duplicate": ("self", "node"),
            "_release_full_host_duplicate": (
                "self",
                "node",
                "tracker",
                "device_frees",
                "host_frees",
                "cache_actions",
            ),
            "_is_device_leaf": ("self", "node"),
            "_is_host_leaf": ("self", "node"),
            "_remove_leaf_from_parent": ("self", "node"),
            "_release_all_component_layers": (
                "self",
                "node",
                "medium",
                "tracker",
                "device_frees",
                "host_frees",
                "cache_actions",
            ),
            "match_prefix": ("self", "params"),
            "inc_lock_ref": ("self", "node_id", "skip_lock_components"),
            "dec_lock_ref": ("self", "node_id", "params", "skip_swa"),
            "_assert_receipt_anchor": ("node", "params"),
            "_unevict_node_on_insert": ("self", "node", "fresh_value", "session_id"),
            "_unregister_node": ("self", "node"),
            "insert_host": ("self", "node_id", "key", "host_value", "hash_value"),
            "finish_write_through": ("self", "node_ids", "ack_id"),
            "_collect_all_nodes": ("self",),
            "commit_backup": ("self", "node_id", "host_indices", "comp_xfers"),
            "commit_load_back": ("self", "node_id", "device_indices", "kv_xfer", "comp_xfers"),
            "drive_host_eviction": ("self", "component_type", "num_tokens"),
            "drop_subtree_no_host": ("self", "node_id"),
            "node_by_id": ("self", "node_id"),
        }.items()
    },
    **{
        f"sglang.srt.mem_cache.unified_cache.components.full:FullComponent.{name}": parameters
        for name, parameters in {
            "__init__": ("self", "cache", "params"),
            "reclaimable_value_len": ("self", "node"),
            "redistribute_on_node_split": ("self", "new_parent", "child"),
            "free_host_values": ("self", "host_values"),
        }.items()
    },
    "sglang.srt.mem_cache.host_memory:available_host_memory_bytes": ("allow_cgroup_fallback",),
    "sglang.srt.mem_cache.pool_host.base:host_memory_budget_scope": ("budget_bytes",),
    "sglang.srt.server_args:ServerArgs.resolved_dict": ("self",),
    "sglang.srt.utils:get_device_name": ("device_id",),
    "sglang.srt.configs.model_config:_get_and_verify_dtype": ("config", "dtype"),
}


def surface_problems(surface: Mapping[str, tuple[str, ...]] = _SURFACE) -> list[str]:
    """What of `surface` the installed SGLang lacks or has with other parameters."""
    problems = []
    for target, parameters in surface.items():
        module, _, path = target.partition(":")
        try:
            found = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
            present = tuple(inspect.signature(found).parameters)  # type: ignore[arg-type]
        except (ImportError, AttributeError) as error:
            problems.append(f"{target}: {error}")
            continue
        if present != parameters:
            problems.append(f"{target} takes {present}, expected {parameters}")
    return problems


def check_sglang() -> None:
    """Raise IncompatibleSGLangError unless the installed SGLang is the one we extend."""
    installed = version("sglang")
    if installed != SGLANG_VERSION:
        raise IncompatibleSGLangError(
            f"this rag-radix extends SGLang {SGLANG_VERSION}, but {installed} is installed: "
            f"pip install sglang=={SGLANG_VERSION}"
        )
    if problems := surface_problems():
        raise IncompatibleSGLangError(
            f"SGLang {installed} differs from the release of that name: " + "; ".join(problems)
        )


def time_counter() -> int:
    """SGLang's logical clock, advanced; nodes made from now on are younger."""
    return get_and_increase_time_counter()  # type: ignore[no-any-return]


def is_finished_unaborted(req: Any) -> bool:
    """Whether SGLang's request `req` has ended with its answer."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return req.finished() and not isinstance(req.finished_reason, FINISH_ABORT)


def is_answered_with_error(req: Any) -> bool:
    """Whether SGLang is to end `req` with an error, and has put a token in place of its prompt."""
    return req.to_finish is not None and req.origin_input_ids == _NO_PROMPT


def abort_dispatched(manager: Any, rid: str) -> None:
    """Abort the request `rid`, which has just left for the schedulers, if SGLang's tokenizer
    manager was told to before."""
    from sglang.srt.managers.io_struct import AbortReq

    state = manager.rid_to_state.get(rid)
    if state is not None and state.abort_sent:
        manager._dispatch_to_scheduler(AbortReq(rid=rid))


def device_bytes_per_token(tree: UnifiedRadixCache) -> int:
    """Bytes of KV that one token takes in the device pool."""
    sizes = tree.token_to_kv_pool_allocator.get_kvcache().get_kv_size_bytes()
    total = sum(sizes) if isinstance(sizes, tuple) else sizes
    pool = tree.token_to_kv_pool_allocator
    # The pool has one page more, which padded tokens write to.
    return int(total // (pool.size + pool.page_size))


def accelerator_name() -> str | None:
    """The accelerator's name as `/v1/loads` has it; None on a CPU."""
    from sglang.srt.utils import get_device_name

    name: str | None = get_device_name()
    return name


def dtype_name(model_config: Any, name: str) -> str:
    """What a model is computed in with `--dtype`; for "auto" it is up to the model."""
    from sglang.srt.configs.model_config import _get_and_verify_dtype

    return str(_get_and_verify_dtype(model_config.hf_text_config, name)).removeprefix("torch.")


@contextmanager
def using_all_memory() -> Iterator[None]:
    """Let host pools take all memory that is available, for those that take a few MiB: SGLang
    leaves 10 GiB of it alone, and refuses to build any pool where there is less."""
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

    with host_memory_budget_scope(available_host_memory_bytes(allow_cgroup_fallback=True)):
        yield


def storage_directory(config: Any) -> str:
    """Where SGLang's storage backend `file` keeps its files."""
    from sglang.srt.environ import envs

    return str(
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()
        or (config.extra_config or {}).get("file_storage_path")
        or "/tmp/hicache"
    )


def use_verified_files() -> None:
    """In this process, let `--hicache-storage-backend file` be ours."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    # A name that is there already would be warned of.
    StorageBackendFactory._registry.pop("file", None)
    StorageBackendFactory.register_backend("file", "rag_radix.storage.backend", "VerifiedFiles")
