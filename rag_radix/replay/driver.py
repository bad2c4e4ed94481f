"""Requests through the real tree, as from a server that has one request at a time and no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rag_radix.cached_prefix import CachedPrefix, PrefixTracker
from rag_radix.cost_model import PrefillCostTable
from rag_radix.errors import ConfigError
from rag_radix.replay.prompts import PromptTokens, ReplayPrompt
from rag_radix.replay.server import replay_context
from rag_radix.replay.trace import TraceRequest

if TYPE_CHECKING:
    from rag_radix.waiting_queue import WaitingQueue

# SGLang's row for a request's slots; there is one request at a time.
_ROW = 1
# SGLang computes what is on host rather than load fewer tokens.
_LOAD_BACK_THRESHOLD_TOKENS = 10
# Above every token id of a replay.
_VOCABULARY = 1 << 62


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request found.

    Attributes:
        arrival: How many requests arrived before it.
        prompt_tokens: Its length.
        documents: Documents in it.
        device_hit_tokens: Tokens that were on the device.
        host_hit_tokens: Tokens that were loaded back from host.
        document_hit_tokens: Tokens of documents among both.
        hit_documents: Documents that were cached as a whole, up to page boundaries.
        swapped_out_tokens: Tokens copied to host while it ran.
    """

    arrival: int
    prompt_tokens: int
    documents: int
    device_hit_tokens: int
    host_hit_tokens: int
    document_hit_tokens: int
    hit_documents: int
    swapped_out_tokens: int

    @property
    def hit_tokens(self) -> int:
        return self.device_hit_tokens + self.host_hit_tokens


class _Arrival(NamedTuple):
    number: int
    request: TraceRequest
    prompt: ReplayPrompt
    req: Any


class Replayer:
    """Serves requests one after the other: match, load back, evict, "compute", publish, release.

    Args:
        tree: A cache over pools from `replay_context`: ours or SGLang's own.
        granularity: Tokens that one of the tree's slots stands for.

    Attributes:
        tree: The cache.
        granularity: As given.
        page_tokens: Tokens that are cached together.
    """

    def __init__(self, tree: Any, granularity: int = 1) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
        from sglang.srt.mem_cache.common import evict_from_tree_cache
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.tree = tree
        self.granularity = granularity
        self.page_tokens = tree.page_size * granularity
        self._prompts = PromptTokens(granularity)
        self._row = tree.req_to_token_pool.req_to_token[_ROW]
        self._allocator = tree.token_to_kv_pool_allocator
        self._arrived = 0
        self._waiting: deque[_Arrival] = deque()
        self._req, self._sampling_params, self._finish_length = Req, SamplingParams, FINISH_LENGTH
        self._load_back_params, self._match_params = InitLoadBackParams, MatchPrefixParams
        self._evict, self._key = evict_from_tree_cache, RadixKey
        if tree.cache_controller is not None:
            tree.load_back_threshold = -(-_LOAD_BACK_THRESHOLD_TOKENS // granularity)
        # Where our tree sees the scheduler's queue; SGLang's own doesn't look.
        tree.waiting = lambda: (arrival.req for arrival in self._waiting)

    def run(
        self, requests: Iterable[TraceRequest], queue: int = 0, order: WaitingQueue | None = None
    ) -> Iterator[Outcome]:
        """Serve all `requests`; an outcome for each, as they are served.

        Args:
            requests: The trace.
            queue: How many of the requests that come next are in the waiting queue while one
                is served, for policies that look there and for `order`.
            order: Says which of those is next, over the tree of this replayer; the oldest is
                without it.

        Raises:
            ConfigError: The device tier is too small for a request.
        """
        for request in requests:
            self._waiting.append(self._arrive(request))
            if len(self._waiting) > queue:
                yield self._serve(self._next(order))
        while self._waiting:
            yield self._serve(self._next(order))

    def _next(self, order: WaitingQueue | None) -> _Arrival:
        if order is None:
            return self._waiting.popleft()
        req, *others = order.arrange([arrival.req for arrival in self._waiting])
        order.serve(req)
        arrivals = {arrival.req: arrival for arrival in self._waiting}
        self._waiting = deque(arrivals[each] for each in others)
        return arrivals[req]

    def serve(self, request: TraceRequest) -> Outcome:
        """One request from match to release.

        Raises:
            ConfigError: The device tier is too small for it.
        """
        return self._serve(self._arrive(request))

    def cached_tokens(self, request: TraceRequest) -> int:
        """How many of a prompt's tokens are cached now, in a knowledge tree; only looks."""
        from rag_radix.namespaces import prompt_key

        prompt = self._prompts.prompt(request)
        limit = prompt.prompt_slots // self.tree.page_size * self.tree.page_size
        extra_key, cache_salt = _names(request)
        key = prompt_key(
            prompt.ids, extra_key, cache_salt, limit=limit, shared_tokens=prompt.shared_slots
        )
        prefix = CachedPrefix(key)
        PrefixTracker(self.tree.tree_core).refresh(prefix)
        return prefix.tokens * self.granularity

    def _arrive(self, request: TraceRequest) -> _Arrival:
        prompt = self._prompts.prompt(request)
        number, self._arrived = self._arrived, self._arrived + 1
        extra_key, cache_salt = _names(request)
        req = self._req(
            f"{number:09d}",
            "",
            prompt.ids[: prompt.prompt_slots],
            self._sampling_params(custom_params=prompt.custom_params),
            extra_key=extra_key,
            cache_salt=cache_salt,
            vocab_size=_VOCABULARY,
        )
        req.full_untruncated_fill_ids = prompt.ids
        return _Arrival(number, request, prompt, req)

    def _serve(self, arrival: _Arrival) -> Outcome:
        _, request, prompt, req = arrival
        swapped_out = self._swapped_out_slots()
        device_hit, host_hit = self._admit(req, prompt)
        self._extend(req, (device_hit + host_hit) * self.granularity, request.prompt_tokens)
        self.tree.checkpoint(req, up_to=prompt.prompt_slots)
        if prompt.computed_tokens > request.prompt_tokens:
            self._extend(req, request.prompt_tokens, prompt.computed_tokens)
        self._finish(req, prompt)
        return self._outcome(arrival, device_hit, host_hit, self._swapped_out_slots() - swapped_out)

    def _admit(self, req: Any, prompt: ReplayPrompt) -> tuple[int, int]:
        """Match, load back what is on host and lock; returns the slots found on each tier."""
        tree = self.tree
        key = self._key(
            prompt.ids, req.extra_key, limit=prompt.matchable_slots, cache_salt=req.cache_salt
        )
        match = tree.match_prefix(self._match_params(key=key, req=req))
        req.last_node, req.host_hit_length = match.last_device_node, match.host_hit_length
        device_hit, host_hit = match.device_prefix_len, 0
        if match.host_hit_length:
            host_hit, req.last_node = tree.init_load_back(
                self._load_back_params(
                    best_match_node=match.best_match_node,
                    host_hit_length=match.host_hit_length,
                    req=req,
                )
            )
        req.lock = tree.lock(req.last_node)
        if host_hit:
            tree.ready_to_load_host_cache()
            tree.check_hicache_events()
        hit = device_hit + host_hit
        if hit:
            self._row[:hit] = tree.path_device_indices(req.last_node)[:hit]
        req.kv.req_pool_idx = _ROW
        req.kv.cache_protected_len = hit
        req.cached_tokens_device, req.cached_tokens_host = device_hit, host_hit
        return device_hit, host_hit

    def _extend(self, req: Any, start_tokens: int, end_tokens: int) -> None:
        """Take slots for a part of the request, evicting what is short."""
        grain = self.granularity
        start, end = -(-start_tokens // grain), -(-end_tokens // grain)
        # A paged server makes room for a page more than it may need.
        spare = self.page_tokens if self.page_tokens > 1 else 0
        self._evict(self.tree, -(-(end_tokens - start_tokens + spare) // grain))
        slots = self._take(start, end)
        if slots is None:
            raise ConfigError(
                f"a request of {end_tokens:,} tokens doesn't fit into the device tier of "
                f"{self._allocator.size * grain:,}: give a larger one"
            )
        self._row[start:end] = slots
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    def _take(self, start: int, end: int) -> Any:
        if self._allocator.page_size == 1:
            return self._allocator.alloc(end - start)
        import torch

        lengths = [torch.tensor([value]) for value in (start, start, end, end)]
        last = torch.tensor([int(self._row[start - 1]) if start else -1])
        return self._allocator.alloc_extend(*lengths, last, end - start)

    def _finish(self, req: Any, prompt: ReplayPrompt) -> None:
        """Publish the output and give back what the tree doesn't keep."""
        tree = self.tree
        req.finished_reason = self._finish_length(1)
        tree.checkpoint(req, up_to=len(prompt.ids))
        tree.free_kv_row(req.kv, [(req.kv.cache_protected_len, req.kv.kv_allocated_len)])
        tree.unlock(req.lock)
        tree.on_release(req, checkpointed=True)
        if tree.cache_controller is not None:
            tree.check_hicache_events()

    def _swapped_out_slots(self) -> int:
        # SGLang's own tree cores don't count them.
        slots: int = getattr(self.tree.tree_core, "swapped_out_tokens", 0)
        return slots

    def _outcome(
        self, arrival: _Arrival, device_hit: int, host_hit: int, swapped_out: int
    ) -> Outcome:
        request, grain = arrival.request, self.granularity
        hit = (device_hit + host_hit) * grain
        document_hit = hit_documents = 0
        for document in request.documents:
            if document.start >= hit:
                break
            document_hit += min(document.end, hit) - document.start
            hit_documents += document.end // self.page_tokens * self.page_tokens <= hit
        return Outcome(
            arrival.number,
            request.prompt_tokens,
            len(request.documents),
            device_hit * grain,
            host_hit * grain,
            document_hit,
            hit_documents,
            swapped_out * grain,
        )


def _names(request: TraceRequest) -> tuple[str | None, str | None]:
    """SGLang's `extra_key` and `cache_salt` for the namespaces of a request."""
    shared, own = request.shared_namespace, request.namespace
    return shared or None, own if own != shared else None


@contextmanager
def knowledge_tree_replayer(
    policy: str,
    policy_config: Mapping[str, Any],
    *,
    device_tokens: int,
    host_tokens: int,
    longest_request_tokens: int,
    cost: PrefillCostTable,
    page_size: int = 16,
    granularity: int | None = None,
) -> Iterator[Replayer]:
    """A replayer over the knowledge tree; one at a time in a process.

    Args:
        policy: As for `--radix-eviction-policy`.
        policy_config: As for `--radix-eviction-policy-config`.
        device_tokens: Tokens of the device tier, rounded down to pages.
        host_tokens: Tokens of the host tier, likewise; 0 for none.
        longest_request_tokens: Prompt and output of the longest request that will come.
        cost: Prefill cost, unless `policy_config` names a `cost_table`.
        page_size: The server's.
        granularity: Tokens that a slot of the replayed tree stands for: the page size by
            default, since a server takes and keeps whole pages, which makes a replay cheaper
            by about that factor. 1 replays token by token and finds the same.

    Raises:
        ConfigError: An unknown policy or setting.
    """
    from rag_radix.backend import build_tree

    grain = page_size if granularity is None else granularity
    with replay_context(
        device_tokens=device_tokens // page_size * page_size // grain,
        host_tokens=host_tokens // page_size * page_size // grain,
        longest_request_tokens=-(-longest_request_tokens // grain),
        page_size=page_size // grain,
    ) as context:
        tree = build_tree(context, policy, policy_config)
        if "cost_table" in policy_config:
            cost = tree.settings.prefill_cost
        tree.settings = replace(tree.settings, prefill_cost=in_slots(cost, grain))
        yield Replayer(tree, grain)


def in_slots(cost: PrefillCostTable, granularity: int) -> PrefillCostTable:
    """`cost` with its grids counted in slots of `granularity` tokens."""
    if granularity == 1:
        return cost
    cached_grid = sorted({tokens // granularity for tokens in cost.cached_tokens})
    new_grid = sorted({-(-tokens // granularity) for tokens in cost.new_tokens})
    return PrefillCostTable(
        tuple(cached_grid),
        tuple(new_grid),
        tuple(
            tuple(cost(cached * granularity, new * granularity) for new in new_grid)
            for cached in cached_grid
        ),
    )
