"""Whatever the scheduler does to the tree, a prefix that counts as current is what is cached."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test
from property.test_tree_machine import _SETTINGS, TreeMachine
from sglang.srt.mem_cache.radix_cache import RadixKey

from rag_radix.cached_prefix import CachedPrefix, PrefixTracker


class TrackedTreeMachine(TreeMachine):
    """Keeps track of the prompts of all requests in flight and of those that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker: PrefixTracker | None = None
        self.prefixes: dict[int, CachedPrefix] = {}

    @invariant()
    def check_prefixes(self) -> None:
        core = self.h.tree.tree_core
        if self.tracker is None:
            core.observer = self.tracker = PrefixTracker(core)
        for flight in self.flights:
            req = flight.req
            limit = (len(flight.prompt) - 1) // self.page_size * self.page_size
            key = RadixKey(req.origin_input_ids, req.extra_key, limit=limit)
            self.prefixes.setdefault(id(req), CachedPrefix(key))
        for prefix in self.prefixes.values():
            kept = prefix.device_tokens, prefix.host_tokens
            fresh = CachedPrefix(prefix.key)
            self.tracker._walk(fresh)
            now = fresh.device_tokens, fresh.host_tokens
            assert not prefix.is_current or kept == now
            self.tracker.refresh(prefix)
            assert (prefix.device_tokens, prefix.host_tokens) == now


def test_a_current_prefix_is_what_is_cached():
    run_state_machine_as_test(
        TrackedTreeMachine, settings=settings(_SETTINGS, max_examples=60, stateful_step_count=50)
    )
