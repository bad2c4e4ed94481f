"""The waiting queue of a knowledge tree: who is next, and who waits for what is being computed.

All of it is decided from what every tensor-parallel rank knows: requests, the tree, a prefill cost
from a fixed table, and counts of requests in place of clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from rag_radix.cached_prefix import CachedPrefix, PrefixTracker
from rag_radix.reordering import ServingOrder, Waiting, reuse_score
from rag_radix.retrieval import Retrieval

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree

# SGLang's own, below which it doesn't look for a common prefix in a batch either.
_WORTH_WAITING_TOKENS = 32


class Turn(Enum):
    """What is to become of a request whose turn it is: it is served, it stays while the next
    one is looked at, or it stays and so do all behind it."""

    SERVE = auto()
    SKIP = auto()
    STOP = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest(Waiting):
    """A request in the queue.

    Attributes:
        req: SGLang's request.
        retrieval: Its documents.
        prefix: What of it is cached.
        next_document: Identifies the first document that isn't cached and is worth waiting
            for, with all that comes before it.
        position: In the order of this pass.
        was_held: Whether it has stayed at least once since its prefix was being computed.
    """

    req: Any
    retrieval: Retrieval
    prefix: CachedPrefix
    next_document: bytes | None = None
    position: int = 0
    was_held: bool = False


class WaitingQueue:
    """Orders SGLang's waiting requests by what they reuse, once a scheduling pass.

    A request whose next document is being computed by another waits for it, and so does one
    whose next document is also that of a better placed one, up to the window. What is being
    computed is asked for anew in each pass, so nothing waits for what has ended in between.

    Args:
        tree: Where requests find their prefixes; it gets our observer.
        window: Of `ServingOrder`.
        load_share: Of `reuse_score`.
        priority_sign: What a request's priority is multiplied with; lower products go first.

    Attributes:
        order: Who overtakes whom.
        tracker: What is cached of the prompts.
        passes: Orders made.
        held_requests: Requests that have stayed at least once since their prefix was being
            computed.
    """

    def __init__(
        self, tree: KnowledgeTree, window: int, load_share: float, priority_sign: int = 0
    ) -> None:
        self.order: ServingOrder[QueuedRequest] = ServingOrder(window)
        self.tracker = tree.tree_core.observer = PrefixTracker(tree.tree_core)
        self.passes = self.held_requests = 0
        self._tree = tree
        self._load_share = load_share
        self._priority_sign = priority_sign
        self._arrivals = 0
        self._queued: dict[Any, QueuedRequest] = {}
        self._computing: set[bytes] = set()
        self._last_free = -1

    @rank_consensus(same_results=["[req.rid for req in result]"])  # type: ignore[untyped-decorator]
    def arrange(self, reqs: Sequence[Any], in_flight: Iterable[Any] = ()) -> list[Any]:
        """SGLang's requests `reqs`, newest last, in the order in which they are to be served,
        while those `in_flight` are being prefilled."""
        self.passes += 1
        self._computing = {key for req in in_flight for key in self._publishes(req)}
        queue = [self._current(req) for req in reqs]
        if len(self._queued) > len(queue):
            self._forget_all_but(queue)
        self._hold(queue)
        arranged = self.order.arrange(queue)
        self._last_free = -1
        for position, queued in enumerate(arranged):
            queued.position = position
            if not (queued.held or queued.speculative):
                self._last_free = position
        return [queued.req for queued in arranged]

    def turn(self, req: Any, cached_tokens: int) -> Turn:
        """Whether `req`, of which `cached_tokens` are cached right now, may be served.

        Costs the scheduler a match each, so once only requests that wait for others are left,
        the first one stops the pass.
        """
        queued = self._queued[req]
        if not self.order.may_be_served(queued):
            return Turn.STOP
        if not self._waits_for(queued, self._next_document(queued, cached_tokens)):
            return Turn.SERVE
        self.held_requests += not queued.was_held
        queued.was_held = True
        return Turn.SKIP if queued.position < self._last_free else Turn.STOP

    def may_go_now(self, req: Any) -> bool:
        """Whether it would be the turn of `req`, by what was cached as the pass began."""
        queued = self._queued[req]
        is_next = self.order.may_be_served(queued)
        return is_next and not self._waits_for(queued, queued.next_document)

    def serve(self, req: Any) -> None:
        """Note that `req` is being served: it is in the queue no more."""
        queued = self._queued.pop(req)
        self.tracker.forget(queued.prefix)
        self.order.serve(queued)
        self._computing.update(self._publishes(req))

    def report(self) -> dict[str, int]:
        """What it has done, as plain JSON values."""
        return {
            "window": self.order.window,
            "passes": self.passes,
            "prefix_walks": self.tracker.walks,
            "most_overtakings": self.order.most_overtakings,
            "held_requests": self.held_requests,
        }

    def _waits_for(self, queued: QueuedRequest, document: bytes | None) -> bool:
        """Whether another computes `document`, which `queued` lacks and may still wait for."""
        return document in self._computing and self.order.overtaken(queued) < self.order.window

    def _publishes(self, req: Any) -> list[bytes]:
        """The documents that `req` will have put into the tree by the end of its prefill."""
        if req.skip_radix_cache_insert or req.finished():
            return []
        return self._tree.path_keys(req)

    def _current(self, req: Any) -> QueuedRequest:
        queued = self._queued.get(req)
        if queued is None:
            queued = self._queued[req] = self._enter(req)
        elif queued.speculative and not queued.retrieval.speculative:
            # Promoted: it arrives among the others as of now.
            queued.speculative, queued.arrival = False, self._next_arrival()
        if not queued.prefix.is_current:
            self._look_up(queued)
        return queued

    def _enter(self, req: Any) -> QueuedRequest:
        retrieval = Retrieval.of(req, self._tree.settings.max_depth)
        return QueuedRequest(
            self._next_arrival(),
            self._priority_sign * req.priority if self._priority_sign else 0,
            retrieval.speculative,
            req=req,
            retrieval=retrieval,
            prefix=CachedPrefix(self._key(req)),
        )

    def _key(self, req: Any) -> RadixKey:
        """What SGLang looks up when it admits `req`; no copy of the prompt."""
        tokens = req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids
        limit = req._compute_max_prefix_len(len(tokens)) // self._tree.page_size
        # With embeddings of its own, tokens don't say what its KV is.
        pages = 0 if req.positional_embed_overrides is not None else limit
        return self._tree.key_of(req, tokens, limit=pages * self._tree.page_size)

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _look_up(self, queued: QueuedRequest) -> None:
        req, prefix = queued.req, queued.prefix
        self.tracker.refresh(prefix)
        # SGLang's load report reads it here.
        req.num_matched_prefix_tokens = prefix.tokens
        queued.score = reuse_score(
            prefix.device_tokens, prefix.host_tokens, req.seqlen - prefix.tokens, self._load_share
        )
        queued.next_document = self._next_document(queued, prefix.tokens)

    def _next_document(self, queued: QueuedRequest, cached_tokens: int) -> bytes | None:
        page_size = self._tree.page_size
        for index, span in enumerate(queued.retrieval.kept_documents):
            end = span.end // page_size * page_size
            if end - cached_tokens >= _WORTH_WAITING_TOKENS:
                return self._tree.path_keys(queued.req)[index]
        return None

    def _forget_all_but(self, queue: list[QueuedRequest]) -> None:
        left = {queued.req: queued for queued in queue}
        for req, queued in self._queued.items():
            if req not in left:
                self.tracker.forget(queued.prefix)
        self._queued = left

    def _hold(self, queue: list[QueuedRequest]) -> None:
        """Mark who is better served later, since another computes what it needs before."""
        first: dict[bytes, QueuedRequest] = {}
        for queued in queue:
            document = queued.next_document
            queued.held = document in self._computing
            if document is None or queued.held:
                continue
            other = first.setdefault(document, queued)
            if other is not queued:
                later = other if _goes_before(queued, other) else queued
                later.held = True
                first[document] = queued if later is other else other


def _goes_before(one: QueuedRequest, other: QueuedRequest) -> bool:
    return (one.speculative, one.priority, -one.score, one.arrival) < (
        other.speculative,
        other.priority,
        -other.score,
        other.arrival,
    )
