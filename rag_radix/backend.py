"""The factory behind `--radix-cache-backend knowledge-tree`, with its start-up checks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from rag_radix import door, scheduler_hooks
from rag_radix.component import KnowledgeComponent
from rag_radix.cost_model import PrefillCostTable, default_cost_table
from rag_radix.errors import ConfigError, IncompatibleSGLangError, UnsupportedError
from rag_radix.knowledge_tree import KnowledgeTree
from rag_radix.profile.file import profile_mismatch
from rag_radix.profile.server import Conditions
from rag_radix.recording import TraceRecorder
from rag_radix.settings import parse_settings, policy_name, served
from rag_radix.sglang_compat import (
    ComponentType,
    accelerator_name,
    check_sglang,
    create_unified_radix_cache,
    device_bytes_per_token,
    dtype_name,
    register_tree_core_backend,
    registered_tree_core_backends,
    use_verified_files,
)
from rag_radix.storage.agreement import is_alike
from rag_radix.storage.identity import weights_digest
from rag_radix.tree_core import KnowledgeTreeCore

logger = logging.getLogger(__name__)

_CORE = "rag-radix-knowledge"
_COPIED = {
    "on_evict": "at eviction",
    "hot": "at eviction, of what many prompts begin with before",
    "eager": "ahead of eviction",
}


def create_knowledge_tree(ctx: Any) -> KnowledgeTree:
    """Build the scheduler's cache from SGLang's `TreeCacheBuildContext`.

    Raises:
        IncompatibleSGLangError: The installed SGLang isn't the one we extend, or something
            we registered isn't in use.
        UnsupportedError: The model or a flag can't be combined with the knowledge tree.
        ConfigError: A wrong policy or policy setting, or a cost table that isn't the same on all
            ranks.
        TraceError: The trace can't be written.
    """
    check_sglang()
    door.verify()
    scheduler_hooks.verify()
    door.check_front_end(ctx.server_args)
    _refuse_unsupported(ctx)
    args = ctx.server_args
    policy = policy_name(args)
    config = args.radix_eviction_policy_config
    tree = build_tree(ctx, policy, served(config))
    _agree_on_cost(tree)
    _log_start(tree, args)
    if config and "cost_table" in config and ctx.tp_rank == 0:
        _warn_of_foreign_profile(config["cost_table"], ctx)
    return tree


def _agree_on_cost(tree: KnowledgeTree) -> None:
    """Each rank has read the cost table from where it runs, and would rank by its own."""
    settings = tree.settings
    if not is_alike(tree, repr(settings.prefill_cost).encode()):
        raise ConfigError(
            f"The prefill cost from {settings.cost_source} isn't the same on all ranks: give each "
            "the same file as cost_table in --radix-eviction-policy-config"
        )


def _warn_of_foreign_profile(path: str, ctx: Any) -> None:
    arguments = ctx.server_args.resolved_dict()
    served = Conditions.of(arguments, accelerator_name(), version("sglang"))
    dtype = partial(dtype_name, ctx.model_config)
    if (difference := profile_mismatch(path, served, dtype)) is not None:
        logger.warning("%s", difference)


def build_tree(ctx: Any, policy: str, config: Mapping[str, Any] | None) -> KnowledgeTree:
    """Build the tree and check that SGLang built it from our parts; for a server, whose config is
    `served`, or without."""
    settings = parse_settings(policy, config, partial(_default_cost, ctx.model_config))
    if _CORE not in registered_tree_core_backends():
        register_tree_core_backend(_CORE, KnowledgeTreeCore)
    params = ctx.params
    params.tree_core_backend = _CORE
    params.component_registry_override = {ComponentType.FULL: KnowledgeComponent}
    # The base class looks the policy up in a closed table; ours never reaches it.
    params.eviction_policy, params.eviction_policy_config = "lru", None
    use_verified_files()
    # One rank is enough: all see the same requests.
    trace = settings.trace if ctx.tp_rank == 0 else None
    recorder = None if trace is None else TraceRecorder(trace)
    tree: KnowledgeTree = create_unified_radix_cache(
        ctx,
        cache_class=partial(
            KnowledgeTree,
            settings=settings,
            recorder=recorder,
            weights=partial(_weights, ctx),
        ),
    )
    _verify_in_use(tree)
    return tree


def _refuse_unsupported(ctx: Any) -> None:
    args = ctx.server_args
    refused = {
        "sliding-window (hybrid SWA) models": ctx.is_hybrid_swa,
        "Mamba and other state-space hybrid models": ctx.is_hybrid_ssm,
        "EAGLE speculative decoding": ctx.params.is_eagle,
        "--disable-radix-cache": ctx.disable_radix_cache,
        "--enable-session-radix-cache": args.enable_session_radix_cache,
        "--enable-streaming-session": args.enable_streaming_session,
        "--enable-lmcache": args.enable_lmcache,
        "--enable-flexkv": args.enable_flexkv,
        "--enable-unified-cache-external-linker": args.enable_unified_cache_external_linker,
        "--hicache-host-memory-mode buffer_only": args.hicache_host_memory_mode == "buffer_only",
        # A rank orders its queue by the bytes of its own layers.
        "pipeline parallelism (--pp-size above 1)": args.pp_size > 1,
        "--disaggregation-mode": args.disaggregation_mode != "null",
    }
    for name, present in refused.items():
        if present:
            raise UnsupportedError(
                f"--radix-cache-backend knowledge-tree doesn't support {name}: drop one of the two"
            )
    has_adapters = args.lora_paths if args.enable_lora is None else args.enable_lora
    if args.hicache_storage_backend is not None and has_adapters:
        # Its name doesn't say which weights an adapter had when its KV was written.
        raise UnsupportedError(
            "--radix-cache-backend knowledge-tree doesn't support --hicache-storage-backend with "
            "LoRA adapters: drop one of the two"
        )
    host_size = args.hicache_ratio is not None or args.hicache_size > 0
    if host_size and not ctx.enable_hierarchical_cache:
        raise UnsupportedError(
            "--hicache-ratio or --hicache-size asks for a host tier, but it is off: "
            "add --enable-hierarchical-cache"
        )


def _weights(ctx: Any) -> int:
    """Number for what the model computes: its weights in memory and its configuration."""
    config = dict(ctx.model_config.hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    text = repr(sorted(config.items(), key=lambda item: item[0])).encode()
    digest = int.from_bytes(sha256(text).digest()[:8], "little") >> 2
    return digest ^ weights_digest(ctx.tp_worker.model_runner.model)


def _default_cost(model: Any) -> PrefillCostTable:
    config = model.hf_text_config
    return default_cost_table(
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        # Mixture-of-experts models may name only the size of one expert.
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        context_tokens=model.context_len,
    )


def _verify_in_use(tree: Any) -> None:
    if not (
        isinstance(tree, KnowledgeTree)
        and isinstance(tree.tree_core, KnowledgeTreeCore)
        and tuple(tree.components) == (ComponentType.FULL,)
        and isinstance(tree.component, KnowledgeComponent)
    ):
        raise IncompatibleSGLangError(
            "SGLang built its cache from other parts than ours: "
            f"{type(tree).__name__} over {type(tree.tree_core).__name__} with "
            f"{[type(c).__name__ for c in tree.components.values()]}"
        )


def _log_start(tree: KnowledgeTree, args: Any) -> None:
    device = tree.token_to_kv_pool_allocator.size
    tiers = f"device {device:,} tokens ({device * device_bytes_per_token(tree) / 2**20:,.0f} MiB)"
    if tree.cache_controller is not None:
        pool = tree.cache_controller.mem_pool_host
        size = pool.logical_size * pool.size_per_token / 2**20
        tiers += f", host {pool.logical_size:,} tokens ({size:,.0f} MiB)"
        if args.hicache_write_policy != "write_back":
            tiers += f"; --hicache-write-policy {args.hicache_write_policy} has no effect"
    else:
        tiers += ", no host tier (--enable-hierarchical-cache adds one)"
    logger.info(
        "Knowledge tree: %s, policy %s with prefill cost from %s, copies %s%s, page %d, %s",
        type(tree).__name__,
        tree.settings.policy,
        tree.settings.cost_source,
        _COPIED[tree.settings.swap_out],
        "" if tree.settings.max_depth is None else f", {tree.settings.max_depth} documents deep",
        tree.page_size,
        tiers,
    )
