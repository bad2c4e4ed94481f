"""One policy over one trace, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rag_radix.cost_model import PrefillCostTable
from rag_radix.reordering import load_share
from rag_radix.replay.driver import Outcome, Replayer, knowledge_tree_replayer
from rag_radix.replay.reference_cost import (
    KV_BYTES_PER_TOKEN,
    PCIE_BYTES_PER_S,
    a10g_mistral_cost_table,
)
from rag_radix.replay.trace import TraceRequest

if TYPE_CHECKING:
    from rag_radix.waiting_queue import WaitingQueue


@dataclass(frozen=True)
class ReplayServer:
    """The server that is imagined.

    Attributes:
        device_tokens: Tokens of the device tier.
        host_tokens: Tokens of the host tier, 0 for none.
        page_size: Tokens that are cached together.
        granularity: See `knowledge_tree_replayer`.
        kv_bytes_per_token: Bytes of KV of one token.
        pcie_bytes_per_s: Rate at which KV is loaded back.
        cost: Prefill cost.
        queue: Requests that wait while one is served.
        reorder_window: How many younger ones may be served before one of them; 0 serves them as
            they come. A policy's own `reorder_window` comes before this one.
    """

    device_tokens: int
    host_tokens: int
    page_size: int = 16
    granularity: int | None = None
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN
    pcie_bytes_per_s: float = PCIE_BYTES_PER_S
    cost: PrefillCostTable = field(default_factory=a10g_mistral_cost_table)
    queue: int = 0
    reorder_window: int = 0

    @property
    def load_s_per_token(self) -> float:
        return self.kv_bytes_per_token / self.pcie_bytes_per_s


@dataclass(frozen=True)
class PolicyVariant:
    """A policy with settings that differ from its defaults.

    Attributes:
        label: How it is called in results.
        policy: As for `--radix-eviction-policy`.
        config: As for `--radix-eviction-policy-config`.
    """

    label: str
    policy: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplayTotals:
    """Sums over the counted requests of a replay.

    Attributes:
        requests: Their number.
        prompt_tokens: Tokens of their prompts.
        documents: Documents in their prompts.
        device_hit_tokens: Tokens found on the device.
        host_hit_tokens: Tokens loaded back from host.
        document_hit_tokens: Tokens of documents among both.
        hit_documents: Documents found as a whole.
        prefill_s: Modelled: prefill of what wasn't cached, and load-back of what was on host.
        d2h_bytes: Copied from device to host.
        h2d_bytes: Loaded back.
        replay_s: CPU time that the replay of these took.
    """

    requests: int
    prompt_tokens: int
    documents: int
    device_hit_tokens: int
    host_hit_tokens: int
    document_hit_tokens: int
    hit_documents: int
    prefill_s: float
    d2h_bytes: int
    h2d_bytes: int
    replay_s: float

    @property
    def token_hit_rate(self) -> float:
        """Cached document tokens by all tokens of the prompts, as in the bound."""
        return self.document_hit_tokens / max(self.prompt_tokens, 1)

    @property
    def prompt_hit_rate(self) -> float:
        """Cached tokens by all tokens of the prompts, as servers report it."""
        return (self.device_hit_tokens + self.host_hit_tokens) / max(self.prompt_tokens, 1)


def replay(
    requests: Sequence[TraceRequest],
    variant: PolicyVariant,
    server: ReplayServer,
    *,
    warm_up: int = 0,
    arrange: Callable[[Replayer, TraceRequest], TraceRequest] | None = None,
    on_request: Callable[[], object] = lambda: None,
) -> ReplayTotals:
    """Serve `requests` one after the other and add up what came of those after `warm_up`.

    Args:
        requests: The trace.
        variant: The policy.
        server: Sizes and costs.
        warm_up: Requests that aren't counted, the first ones to arrive, whenever they are served.
        arrange: Makes of a request that arrives the one that is served, with its documents in
            another order.
        on_request: Called after each request, for a progress bar.

    Raises:
        ConfigError: An unknown policy or setting, or a request longer than the device tier.
    """
    longest = max((r.prompt_tokens + r.output_tokens for r in requests), default=1)
    outcomes: list[Outcome] = []
    started = time.process_time()
    with knowledge_tree_replayer(
        variant.policy,
        {"reorder_window": server.reorder_window, **variant.config},
        device_tokens=server.device_tokens,
        host_tokens=server.host_tokens,
        longest_request_tokens=longest,
        cost=server.cost,
        page_size=server.page_size,
        granularity=server.granularity,
    ) as replayer:
        arranged = requests if arrange is None else (arrange(replayer, each) for each in requests)
        for outcome in replayer.run(arranged, server.queue, _order(replayer, server)):
            outcomes.append(outcome)
            if len(outcomes) == warm_up:
                started = time.process_time()
            on_request()
    replay_s = time.process_time() - started
    counted = [outcome for outcome in outcomes if outcome.arrival >= warm_up]
    return _totals(counted, server, replay_s)


def _order(replayer: Replayer, server: ReplayServer) -> WaitingQueue | None:
    from rag_radix.waiting_queue import WaitingQueue

    window = replayer.tree.settings.reorder_window
    if window == 0:
        return None
    return WaitingQueue(replayer.tree, window, load_share(server.cost, server.load_s_per_token))


def _totals(outcomes: Sequence[Outcome], server: ReplayServer, replay_s: float) -> ReplayTotals:
    host_hit_tokens = sum(outcome.host_hit_tokens for outcome in outcomes)
    prefill_s = sum(
        server.cost(outcome.hit_tokens, outcome.prompt_tokens - outcome.hit_tokens)
        for outcome in outcomes
    )
    return ReplayTotals(
        requests=len(outcomes),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
        documents=sum(outcome.documents for outcome in outcomes),
        device_hit_tokens=sum(outcome.device_hit_tokens for outcome in outcomes),
        host_hit_tokens=host_hit_tokens,
        document_hit_tokens=sum(outcome.document_hit_tokens for outcome in outcomes),
        hit_documents=sum(outcome.hit_documents for outcome in outcomes),
        prefill_s=prefill_s + host_hit_tokens * server.load_s_per_token,
        d2h_bytes=sum(outcome.swapped_out_tokens for outcome in outcomes)
        * server.kv_bytes_per_token,
        h2d_bytes=host_hit_tokens * server.kv_bytes_per_token,
        replay_s=replay_s,
    )
