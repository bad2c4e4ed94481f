"""A radix cache over pools without KV, driven as SGLang's scheduler drives it, with a clock."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
from tree_workload import Prompt

from rag_radix.backend import build_tree
from rag_radix.history import HALF_LIVES, PathHistory, Topic
from rag_radix.sglang_compat import create_unified_radix_cache, using_all_memory

KNOWLEDGE = "knowledge"
STOCK_CORES = {"stock-python": "python", "stock-rust": "rust"}
# Above what any document of a measured prompt reaches.
_POPULAR_USES, _POPULAR_LEAD, _POPULAR_COUNT = 1_000, 1_000_000, 1e9
_PHASES = {
    "match": "match_prefix",
    "load_back": "init_load_back",
    "evict": "evict_for_alloc",
    "host_evict": "evict_host",
    "checkpoint": "checkpoint",
    "lock": "inc_lock_ref",
    "unlock": "dec_lock_ref",
}
_KNOWLEDGE_PHASES = {"insert": "_publish", "name": "_cut_and_name", "count": "_counting.count"}
_STOCK_PHASES = {"insert": "insert"}


@dataclass(frozen=True)
class Served:
    """What one request found and cost.

    Attributes:
        wall_s: Time inside the tree.
        cpu_s: CPU time of it.
        device_hit_tokens: Found on the device.
        host_hit_tokens: Loaded back from host.
    """

    wall_s: float
    cpu_s: float
    device_hit_tokens: int
    host_hit_tokens: int


class _NoCopies:
    """SGLang's transfer engine without transfers: each copy is done when it is submitted."""

    def __init__(self) -> None:
        from sglang.srt.mem_cache.l2_transfer import TransferCompletion, make_timing_event_pair

        self.device_to_host_stream = torch.cpu.Stream()
        self.host_to_device_stream = torch.cpu.Stream()
        self._done = TransferCompletion(*make_timing_event_pair())

    def submit_device_to_host(self, transfers: Sequence[Any]) -> Any:
        return self._done

    def submit_host_to_device(self, transfers: Sequence[Any], **_: Any) -> Any:
        return self._done


@contextmanager
def server_arguments(device_tokens: int, host_tokens: int) -> Iterator[Any]:
    """SGLang's arguments for trees over a host tier; trees may be used inside only."""
    from sglang.srt.runtime_context import get_context

    from rag_radix.cpu_platform import install_host_tier_shims

    install_host_tier_shims()
    with (
        using_all_memory(),
        get_context().override_server_args(
            page_size=1,
            enable_hierarchical_cache=True,
            hicache_ratio=host_tokens / device_tokens,
            hicache_write_policy="write_back",
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
            hicache_host_memory_fraction=None,
        ) as arguments,
    ):
        yield arguments


class TreeDriver:
    """One tree with pools of its own.

    The pools hand out slots of a KV cache of one number a token, and nothing is ever copied.

    Attributes:
        name: `KNOWLEDGE` or one of `STOCK_CORES`.
        tree: SGLang's cache, or ours.
    """

    def __init__(
        self, name: str, arguments: Any, device_tokens: int, policy: str, config: dict[str, Any]
    ) -> None:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.registry import TreeCacheBuildContext

        self.name = name
        self.rows = ReqToTokenPool(4, device_tokens, "cpu", False)
        kv = MHATokenToKVPool(
            device_tokens,
            1,
            torch.float16,
            1,
            1,
            1,
            "cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
        )
        self.allocator = TokenToKVPoolAllocator(device_tokens, torch.float16, "cpu", kv, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            tree_core_backend=STOCK_CORES.get(name),
        )
        context = TreeCacheBuildContext(
            server_args=arguments,
            params=params,
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            enable_hierarchical_cache=True,
            disable_radix_cache=False,
            tp_worker=SimpleNamespace(register_hicache_layer_transfer_counter=lambda counter: None),
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(
                    num_hidden_layers=30, hidden_size=576, intermediate_size=1536
                ),
                context_len=16384,
            ),
            tp_size=1,
            tp_rank=0,
            tp_group=None,
        )
        if name == KNOWLEDGE:
            self.tree: Any = build_tree(context, policy, config)
        else:
            self.tree = create_unified_radix_cache(context)
            core = type(self.tree.tree_core).__name__
            if ("Rust" in core) != (STOCK_CORES[name] == "rust"):
                raise RuntimeError(f"{name} runs on {core}")
        controller = self.tree.cache_controller
        controller.l2_transfer_engine = _NoCopies()
        # The order in which rows are copied is part of copying.
        controller._move_op_indices = controller._move_write_operation = lambda op: (
            op.host_indices,
            op.device_indices,
            op.pool_transfers,
        )
        self._kept = False
        self._rids = (f"{name}-{number}" for number in itertools.count())

    @property
    def host_available_tokens(self) -> int:
        available: int = self.tree.cache_controller.mem_pool_host.available_size()
        return available

    @property
    def nodes(self) -> int:
        """Nodes of the tree but the root; -1 where the core doesn't tell."""
        arena = getattr(self.tree.tree_core, "_node_arena", None)
        return len(arena) - 1 if arena is not None else -1

    # Population

    def populate(self, prompts: Sequence[Prompt]) -> None:
        """Insert prompts and swap them out to host."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams
        from sglang.srt.mem_cache.common import release_kv_cache

        # SGLang's Python core looks for a child on the device in the order of insertion. The
        # first one stays there meanwhile, or the time would grow with the square of the number.
        first = self._insert(prompts[0])
        for number, prompt in enumerate(prompts[1:], start=1):
            release_kv_cache(self._insert(prompt), self.tree, checkpoint=False)
            if self.allocator.available_size() < 2 * len(prompt.tokens) or number % 500 == 0:
                self.tree.evict(EvictParams(num_tokens=self.allocator.size))
        release_kv_cache(first, self.tree, checkpoint=False)
        self.tree.evict(EvictParams(num_tokens=self.allocator.size))

    def _insert(self, prompt: Prompt) -> Any:
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        req = self._request(prompt)
        self._admit(req, self.tree)
        self._extend(req)
        checkpoint_kv_cache(req, self.tree)
        return req

    def keep(self, prompts: Sequence[Prompt]) -> None:
        """Make the documents of `prompts` the last that the tree would evict: in ours by many
        uses, once for all; in stock by a match, for a while."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        if self._kept:
            return
        for prompt in prompts:
            found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(prompt.tokens)))
            if self.name == KNOWLEDGE:
                core = self.tree.tree_core
                node = core.node_by_id(found.best_match_node)
                node.statistics.frequency = _POPULAR_USES
                node.statistics.last_access = core.access_time + _POPULAR_LEAD
                if (history := node.statistics.history) is not None:
                    node.statistics.history = _popular(history)
                core.rank(node)
        self._kept = self.name == KNOWLEDGE

    # A measured request

    def serve(self, prompt: Prompt) -> Served:
        """Run one request, without a model, as the scheduler would."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import (
            checkpoint_kv_cache,
            evict_from_tree_cache,
            release_kv_cache,
        )

        clock = _Clock()
        tree: Any = _TimedTree(self.tree, clock)
        req = self._request(prompt)
        self._admit(req, tree)
        row = tree.prefix_device_indices(req)
        evict_from_tree_cache(tree, len(prompt.tokens) - req.prefix_len)
        self._extend(req, row)
        tree.check_hicache_events()
        checkpoint_kv_cache(req, tree)
        evict_from_tree_cache(tree, len(prompt.output))
        self._decode(req, prompt.output)
        req.finished_reason = FINISH_LENGTH(len(prompt.output))
        req.finished_len = len(prompt.output)
        release_kv_cache(req, tree, checkpoint=True)
        return Served(clock.wall_s, clock.cpu_s, req.cached_tokens_device, req.cached_tokens_host)

    def _request(self, prompt: Prompt) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        documents = [
            {"id": name, "version": "", "start": start, "end": end}
            for name, (start, end) in zip(prompt.names, prompt.spans, strict=True)
        ]
        rag = {"documents": documents, "unit": "token", "speculative": False, "strict": False}
        params = SamplingParams(max_new_tokens=len(prompt.output), custom_params={"rag": rag})
        return Req(next(self._rids), "", prompt.tokens, params, vocab_size=1 << 62)

    @staticmethod
    def _admit(req: Any, tree: Any) -> None:
        """Match, load back what is on host, lock."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        req.init_next_round_input(tree)
        if req.needs_host_load_back():
            req.host_loaded_length, req.last_node = tree.init_load_back(
                InitLoadBackParams(
                    best_match_node=req.best_match_node,
                    host_hit_length=req.host_hit_length,
                    req=req,
                )
            )
            req.prefix_len += req.host_loaded_length
            req.kv.cache_protected_len = req.prefix_len
        req.lock = tree.lock(req.last_node)

    def _extend(self, req: Any, row: torch.Tensor | None = None) -> None:
        """Allocate the prompt's slots, as a prefill does."""
        self.tree.ready_to_load_host_cache()
        self.rows.alloc([req])
        if row is not None:
            self.rows.write((req.kv.req_pool_idx, slice(0, len(row))), row.to(torch.int32))
        host = req.materialized_host_hit_len()
        req.cached_tokens_device, req.cached_tokens_host = req.prefix_len - host, host
        req._cache_breakdown_computed = True
        self._allocate(req, req.prefix_len, len(req.origin_input_ids))
        req.extend_end = len(req.origin_input_ids)

    def _decode(self, req: Any, output: array[int]) -> None:
        # The last token has no KV.
        req.output_ids.extend(output)
        start = len(req.origin_input_ids)
        self._allocate(req, start, start + len(output) - 1)

    def _allocate(self, req: Any, start: int, end: int) -> None:
        slots = self.allocator.alloc(end - start)
        if slots is None:
            raise RuntimeError(f"{self.name}: the device tier has no {end - start} slots left")
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots.to(torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    @contextmanager
    def phases(self) -> Iterator[dict[str, list[float]]]:
        """Collect the CPU seconds of each call of the tree's phases, the time of nested phases
        not included. The clocks slow the tree down: take totals elsewhere."""
        names = _PHASES | (_KNOWLEDGE_PHASES if self.name == KNOWLEDGE else _STOCK_PHASES)
        seconds: dict[str, list[float]] = {phase: [] for phase in names}
        nested = [0.0]
        timed = []
        for phase, path in names.items():
            *parts, method = path.split(".")
            owner = reduce(getattr, parts, self.tree)
            setattr(owner, method, _timed(getattr(owner, method), seconds[phase], nested))
            timed.append((owner, method))
        try:
            yield seconds
        finally:
            for owner, method in timed:
                delattr(owner, method)


def _popular(history: PathHistory) -> PathHistory:
    """One that is as old, of a popular path on which the model doesn't count."""
    topic = Topic()
    topic.counts, topic.uses = (_POPULAR_COUNT,) * len(HALF_LIVES), 1
    topic.last_use = history.topic.last_use
    popular = PathHistory(topic)
    popular.uses, popular.group = 1, history.group
    return popular


class _TimedTree:
    """A tree, the time of whose work on requests is taken: what SGLang's scheduler calls of it, not
    what it does with its request in between.

    What the tree calls of itself isn't seen here, so nothing is counted twice.
    """

    _CALLS = (
        "match_prefix",
        "init_load_back",
        "lock",
        "prefix_device_indices",
        "evict_for_alloc",
        "check_hicache_events",
        "checkpoint",
        "free_kv_row",
        "unlock",
        "on_release",
    )

    def __init__(self, tree: Any, clock: _Clock) -> None:
        self._tree = tree
        for name in self._CALLS:
            setattr(self, name, clock.guard(getattr(tree, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)


class _Clock:
    """Adds up the time of the calls that it guards."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def guard(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.wall_s += time.perf_counter() - wall
                self.cpu_s += time.thread_time() - cpu

        return call


def _timed(
    method: Callable[..., Any], seconds: list[float], nested: list[float]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        nested.append(0.0)
        start = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            elapsed = time.thread_time() - start
            seconds.append(elapsed - nested.pop())
            nested[-1] += elapsed

    return call
