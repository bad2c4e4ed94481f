"""The real tree, pools, controller and requests of SGLang, without a model.

`Harness` plays the scheduler: it matches, loads back, allocates, "computes" and publishes as
SGLang does, one request at a time or interleaved. The KV of a token is a number derived from
the whole prefix that ends in it, so that a slot that holds another prefix's KV is found.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from rag_radix.knowledge_tree import KnowledgeTree
from rag_radix.sglang_compat import ComponentType

LAYERS, HEADS, HEAD_DIM = 2, 1, 4


@contextmanager
def harness(
    *,
    device_tokens: int,
    host_tokens: int = 0,
    page_size: int = 1,
    policy: str = "pgdsf",
    policy_config: dict[str, Any] | None = None,
    weights: float = 0.0,
    **more_flags: Any,
) -> Iterator[Harness]:
    """A knowledge tree over a device pool of `device_tokens` and, if positive, a host pool of
    `host_tokens` slots, for a model of these `weights`; with more of SGLang's flags."""
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.runtime_context import get_context

    from rag_radix import cpu_platform

    cpu_platform.install_host_tier_shims()
    flags: dict[str, Any] = {
        "radix_cache_backend": "knowledge-tree",
        "page_size": page_size,
        "enable_hierarchical_cache": host_tokens > 0,
        "hicache_ratio": host_tokens / device_tokens if host_tokens else None,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        "hicache_host_memory_fraction": None,
        **more_flags,
    }
    with (
        # These pools are a few kilobytes; SGLang wants 10 GiB left over beside any.
        patch.object(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0),
        get_context().override_server_args(**flags) as server_args,
    ):
        yield Harness(
            server_args,
            device_tokens,
            host_tokens > 0,
            page_size,
            policy,
            policy_config or {},
            weights,
        )


class Harness:
    def __init__(
        self,
        server_args: Any,
        device_tokens: int,
        host_tier: bool,
        page_size: int,
        policy: str,
        policy_config: dict[str, Any],
        weights: float,
    ) -> None:
        from sglang.srt.mem_cache.allocator import (
            PagedTokenToKVPoolAllocator,
            TokenToKVPoolAllocator,
        )
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.registry import TreeCacheBuildContext

        from rag_radix.backend import build_tree

        self.page_size = page_size
        self.model = _model(weights)
        self.rows = ReqToTokenPool(64, 4 * device_tokens + 64, "cpu", False)
        self.kv = MHATokenToKVPool(
            device_tokens,
            page_size,
            torch.float32,
            HEADS,
            HEAD_DIM,
            LAYERS,
            "cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
        )
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(
                device_tokens, torch.float32, "cpu", self.kv, False
            )
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                device_tokens, page_size, torch.float32, "cpu", self.kv, False
            )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
        )
        context = TreeCacheBuildContext(
            server_args=server_args,
            params=params,
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            enable_hierarchical_cache=host_tier,
            disable_radix_cache=False,
            tp_worker=SimpleNamespace(
                register_hicache_layer_transfer_counter=lambda counter: None,
                model_runner=SimpleNamespace(model=self.model),
            ),
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(to_dict=dict),
                hf_text_config=SimpleNamespace(
                    num_hidden_layers=30, hidden_size=576, intermediate_size=1536
                ),
                context_len=8192,
            ),
            tp_size=1,
            tp_rank=0,
            tp_group=None,
        )
        self.tree: KnowledgeTree = build_tree(context, policy, policy_config)
        self._held: list[HeldEvent] = []
        self._rids = (f"request-{number:08d}" for number in itertools.count())

    # One request, step by step

    def request(
        self,
        tokens: Sequence[int],
        documents: Sequence[tuple[str, int, int]] = (),
        *,
        version: str = "",
        max_new_tokens: int = 4,
        n: int = 1,
        speculative: bool = False,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        salt_from: int | None = None,
    ) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        rag = {
            "documents": [
                {"id": name, "version": version, "start": start, "end": end}
                for name, start, end in documents
            ],
            "unit": "token",
            "speculative": speculative,
            "strict": False,
            "salt_from": salt_from,
        }
        params = SamplingParams(
            max_new_tokens=max_new_tokens, n=n, custom_params={"rag": rag} if documents else None
        )
        ids = array("q", tokens)
        return Req(
            next(self._rids),
            "",
            ids,
            params,
            extra_key=extra_key,
            cache_salt=cache_salt,
            vocab_size=1 << 30,
        )

    def guess(self, *args: Any, **kwargs: Any) -> Any:
        """A speculative request, let into the waiting queue."""
        req = self.request(*args, speculative=True, **kwargs)
        self.tree.speculations.start(req)
        return req

    def admit(self, req: Any) -> None:
        """Match the request, load back what is on host and lock its prefix."""
        req.init_next_round_input(self.tree)
        self.load_back(req)
        self.start(req)
        self.poll()

    def load_back(self, req: Any) -> None:
        """Begin to copy the part of the matched prefix that is on host only to the device."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        if req.needs_host_load_back():
            loaded = self.tree.init_load_back(
                InitLoadBackParams(
                    best_match_node=req.best_match_node,
                    host_hit_length=req.host_hit_length,
                    req=req,
                )
            )
            assert loaded is not None
            req.host_loaded_length, req.last_node = loaded
            assert req.host_loaded_length in (0, req.host_hit_length)
            req.prefix_len += req.host_loaded_length
            req.kv.cache_protected_len = req.prefix_len

    def start(self, req: Any) -> None:
        """Lock the request's prefix and give it a row, as the first step of its prefill."""
        req.lock = self.tree.lock(req.last_node)
        self.tree.ready_to_load_host_cache()
        self.rows.alloc([req])
        row = self.tree.prefix_device_indices(req)
        self.rows.write((req.kv.req_pool_idx, slice(0, len(row))), row.to(torch.int32))
        self.check_kv(req.full_untruncated_fill_ids, row)
        if not req.retracted_stain and not req._cache_breakdown_computed:
            host = req.materialized_host_hit_len()
            req.cached_tokens_device, req.cached_tokens_host = req.prefix_len - host, host
            req._cache_breakdown_computed = True
        self.tree.control.started([req])

    def compute(self, req: Any, tokens: int | None = None) -> None:
        """Prefill the next `tokens` (all by default) without publishing them."""
        start = req.prefix_len
        end = len(req.full_untruncated_fill_ids)
        if tokens is not None:
            end = min(end, start + tokens)
        self._extend(req, start, end)
        req.extend_end = end
        self.tree.speculations.prefilling([req])

    def publish(self, req: Any) -> None:
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        checkpoint_kv_cache(req, self.tree)
        self.poll()

    def decode(self, req: Any, token: int) -> None:
        """Append one output token, and compute the KV of the one before it."""
        req.refresh_fill_ids()
        computed, length = req.kv.kv_committed_len, len(req.full_untruncated_fill_ids)
        if computed < length:
            self._extend(req, computed, length)
        req.output_ids.append(token)

    def finish(self, req: Any, *, aborted: bool = False) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        req.finished_reason = FINISH_ABORT() if aborted else FINISH_LENGTH(len(req.output_ids))
        req.finished_len = len(req.output_ids)
        release_kv_cache(req, self.tree, checkpoint=True)
        self.poll()

    def drop(self, req: Any) -> None:
        """Retract or abort without publishing."""
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, self.tree, checkpoint=False)
        self.poll()

    def serve(
        self,
        tokens: Sequence[int],
        documents: Sequence[tuple[str, int, int]] = (),
        *,
        output: Sequence[int] = (9_000_001, 9_000_002, 9_000_003),
        chunk: int | None = None,
        **request: Any,
    ) -> Any:
        """A whole request; returns it with its hit lengths."""
        req = self.request(tokens, documents, **request)
        self.admit(req)
        while True:
            self.compute(req, chunk)
            self.publish(req)
            if req.extend_end == len(req.origin_input_ids):
                break
        for token in output:
            self.decode(req, token)
        self.finish(req)
        self.check()
        return req

    def poll(self) -> None:
        if self.tree.cache_controller is not None:
            self.tree.check_hicache_events()

    # Copies to host

    def hold_copies(self) -> None:
        """From now on copies to host are not done until `finish_copies` or until somebody
        waits for them."""
        controller = self.tree.cache_controller
        submit = controller.start_writing

        def start_writing() -> None:
            before = len(controller.ack_write_queue)
            submit()
            for index in range(before, len(controller.ack_write_queue)):
                event = HeldEvent()
                self._held.append(event)
                ack = controller.ack_write_queue[index]
                controller.ack_write_queue[index] = ack._replace(finish_event=event)

        controller.start_writing = start_writing

    def finish_copies(self) -> None:
        for event in self._held:
            event.done = True
        self._held.clear()

    # KV contents

    def _extend(self, req: Any, start: int, end: int) -> None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.tree, end - start + self.page_size)
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        if self.page_size == 1:
            slots = self.allocator.alloc(end - start)
        else:
            lengths = [torch.tensor([value]) for value in (start, start, end, end)]
            last = torch.tensor([int(row[start - 1]) if start else -1])
            slots = self.allocator.alloc_extend(*lengths, last, end - start)
        assert slots is not None, "the device tier is full of locked tokens"
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots.to(torch.int32))
        values = prefix_values(req.full_untruncated_fill_ids[:end])[start:end]
        for layer in range(LAYERS):
            self.kv.k_buffer[layer][slots] = values.view(-1, 1, 1).float() + layer
            self.kv.v_buffer[layer][slots] = -values.view(-1, 1, 1).float() - layer
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    def check_kv(self, tokens: Sequence[int], slots: torch.Tensor) -> None:
        """Assert that `slots` hold the KV of the leading `tokens`, bit for bit."""
        values = prefix_values(tokens[: len(slots)]).view(-1, 1, 1).float()
        for layer in range(LAYERS):
            shape = (len(slots), HEADS, HEAD_DIM)
            assert torch.equal(self.kv.k_buffer[layer][slots], (values + layer).expand(shape))
            assert torch.equal(self.kv.v_buffer[layer][slots], (-values - layer).expand(shape))

    # Checks and views

    def check(self) -> None:
        """Integrity, and the KV of every node on the device."""
        self.tree.check_integrity()
        for node in self.tree.tree_core.nodes():
            if not node.evicted:
                path = self.tree.tree_core.path_to(node.id)
                tokens = [token for above in path for token in above.key.token_ids]
                self.check_kv(tokens, self.tree.path_device_indices(node.id))

    def nodes(self) -> list[Any]:
        return self.tree.tree_core.nodes()

    def ends(self) -> dict[str, Any]:
        """The node at which each document ends, by id; the last one when there are several."""
        return {
            occurrence.document.id: node for node in self.nodes() for occurrence in node.occurrences
        }

    def on_device(self, name: str) -> bool:
        node = self.ends().get(name)
        return node is not None and node.component_data[ComponentType.FULL].value is not None

    def on_host(self, name: str) -> bool:
        node = self.ends().get(name)
        return node is not None and node.backuped


class HeldEvent:
    """The end of a copy, which comes when it is told to."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def _model(weights: float) -> torch.nn.Module:
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, weights)
    torch.nn.init.zeros_(model.bias)
    return model


def prefix_values(tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens)] int64 below 2^22: one number for each prefix of `tokens`."""
    value, values = 17, []
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (1 << 22)
        values.append(value)
    return torch.tensor(values, dtype=torch.int64)
