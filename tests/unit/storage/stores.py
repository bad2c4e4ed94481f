"""A tree with a storage backend, as one server after another has it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tree_harness import Harness, harness

DEADLINE_S = 120.0


@contextmanager
def server(directory: Path, *, waits_s: float | None = None, **options: Any) -> Iterator[Store]:
    """A server that keeps its files in `directory` and waits for what it reads, or for `waits_s`.
    It ends as if killed, unless it is stopped."""
    from sglang.srt.runtime_context import get_parallel

    config = {"store_after": 1, "preload_host_share": 0, **options.pop("policy_config", {})}
    ranks = {"tp_rank": 0, "pp_rank": 0, "attn_dcp_rank": 0}
    extra = {
        "prefetch_threshold": 1,
        "file_storage_path": str(directory),
        "prefetch_timeout_base": waits_s or 0,
        "prefetch_timeout_per_ki_token": 0,
    }
    with (
        get_parallel().override(**ranks),
        harness(
            **{"device_tokens": 1000, "host_tokens": 2000, **options},
            policy_config=config,
            hicache_storage_backend="file",
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy="wait_complete" if waits_s is None else "timeout",
        ) as h,
    ):
        store = Store(h)
        try:
            yield store
        finally:
            h.tree.cache_controller._stop_storage_threads()


class Store:
    """
    Attributes:
        h: The harness.
        tree: Its tree.
    """

    def __init__(self, h: Harness) -> None:
        self.h = h
        self.tree = h.tree

    @property
    def files(self) -> Any:
        return self.tree.storing._files

    def ask(self, prompt: Any, **request: Any) -> Any:
        """A whole request, whose prompt may come from storage; returns it with `from_storage`,
        the tokens that did."""
        tokens, documents = prompt
        req = self.h.request(tokens, documents, **request)
        req.from_storage = self.fetch(req)
        self.h.admit(req)
        self.attribute(req)
        self.h.compute(req)
        self.h.publish(req)
        self.h.decode(req, 9_000_001)
        self.h.finish(req)
        self.settle()
        self.h.check()
        if self.tree.prefetch_stop_policy == "wait_complete" and not self.tree.ongoing_prefetch:
            self.check_host()
        return req

    @staticmethod
    def attribute(req: Any) -> None:
        """Say where its prefix was found, as the scheduler does."""
        from sglang.srt.managers.schedule_batch import split_cached_prefix_by_tier

        req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage = (
            split_cached_prefix_by_tier(
                req.prefix_len,
                req.materialized_host_hit_len(),
                req.storage_hit_length,
                req.storage_hit_start,
            )
        )

    def check_host(self) -> None:
        """While nothing is read, each host slot is free or a node's."""
        pool = self.tree.cache_controller.mem_pool_host
        held = sum(len(node.key) for node in self.h.nodes() if node.backuped)
        assert held + self.tree.swap_out.host_slots.available_tokens == pool.logical_size

    def begin(self, req: Any) -> None:
        """As the scheduler does when a request comes to the queue."""
        tree = self.tree
        tree.waiting = lambda: [req]
        req.init_next_round_input(tree)
        node, matched = req.last_host_node, req.prefix_len + req.host_hit_length
        if tree.is_backuped(node) or tree.is_root(node):
            tokens = req.full_untruncated_fill_ids
            tree.prefetch_from_storage(
                req.cache_request_handle,
                node,
                tokens[matched : len(tokens) - 1],
                tree.get_last_hash_value(node),
                None,
                matched_prefix_tokens=tokens[:matched],
                extra_key=req.extra_key,
                cache_salt=req.cache_salt,
            )

    def fetch(self, req: Any) -> int:
        self.begin(req)
        handle = req.cache_request_handle
        self.wait(lambda: self.tree.check_prefetch_progress(handle))
        tokens, start = self.tree.pop_prefetch_loaded_span(handle)
        if tokens:
            req.storage_hit_length, req.storage_hit_start = tokens, start
        return tokens

    def wait(self, done: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            self.h.poll()
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def settle(self) -> None:
        """Until all that was begun is on disk."""
        tree = self.tree
        tree.check_hicache_events()
        self.wait(lambda: not tree.ongoing_write_through and not tree.ongoing_backup)

    def stop(self) -> None:
        """As the scheduler does when it is told to end."""
        self.tree.release_host_resources()
