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
        documents: Documents the requests asked for.
        device_hit_documents: Found whole on the device.
        host_hit_documents: Found whole, at least in part on host.
        dropped_tail_nodes: Tails that left the device without a copy.
        dropped_tail_tokens: Their tokens.
        refused_nodes: Nodes that the policy did not find worth a copy to host.
        refused_tokens: Their tokens.
    """

    requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    documents: int = 0
    device_hit_documents: int = 0
    host_hit_documents: int = 0
    dropped_tail_nodes: int = 0
    dropped_tail_tokens: int = 0
    refused_nodes: int = 0
    refused_tokens: int = 0
