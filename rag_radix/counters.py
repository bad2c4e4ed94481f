"""What a knowledge tree has done since start, in numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestCounters:
    """Counted once per request, at its first prefill, from what it really used.

    Attributes:
        requests: Requests counted.
        prompt_tokens: Tokens of their prompts.
        device_hit_tokens: Of these, found on the device.
        host_hit_tokens: Of these, loaded back from host.
        storage_hit_tokens: Of these, read from a storage backend for this request.
        documents: Documents the requests asked for.
        device_hit_documents: Found whole on the device.
        host_hit_documents: Found whole, at least in part on host or in storage.
        dropped_tail_nodes: Tails that left the device without a copy.
        dropped_tail_tokens: Their tokens.
        refused_nodes: Nodes that at their eviction the policy did not find worth a copy to host.
        refused_tokens: Their tokens.
        saved_prefill_s: Prefill that the hits have saved, by the cost table.
    """

    requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    documents: int = 0
    device_hit_documents: int = 0
    host_hit_documents: int = 0
    dropped_tail_nodes: int = 0
    dropped_tail_tokens: int = 0
    refused_nodes: int = 0
    refused_tokens: int = 0
    saved_prefill_s: float = 0.0


@dataclass(slots=True)
class SpeculationCounters:
    """What has become of speculative requests.

    Attributes:
        started: Admitted to the waiting queue.
        refused: Not admitted, since too many requests waited.
        ended: Ended by us, since requests that are no speculations waited.
        promoted: Kept: they count as retrievals.
        cancelled: Aborted by their clients or by SGLang before they were promoted.
        wasted_tokens: Computed, prompt and output, by speculations that are over without
            having been promoted; one that is promoted later takes its tokens back.
        scheduler_s: CPU time of the scheduler's thread in letting requests in, letting
            speculations step aside, promoting them and saying whether there is room.
    """

    started: int = 0
    refused: int = 0
    ended: int = 0
    promoted: int = 0
    cancelled: int = 0
    wasted_tokens: int = 0
    scheduler_s: float = 0.0
