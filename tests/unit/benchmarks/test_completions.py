"""The same request in both interfaces."""

from __future__ import annotations

import asyncio

import pytest
from rag_radix_benchmarks import completions
from rag_radix_benchmarks.completions import completion_body
from rag_radix_benchmarks.prompts import PromptWriter

from rag_radix.replay.trace import TraceDocument, TraceRequest


def body(namespace=""):
    documents = (TraceDocument("a", "", 2, 5), TraceDocument("b", "1", 6, 9))
    request = TraceRequest(0.0, documents, 12, output_tokens=3, namespace=namespace)
    return PromptWriter(range(100), seed=1).body(request, number=4)


def test_a_peer_is_asked_the_same_tokens_for_as_many():
    native = body()
    peer = completion_body(native, "some/model")
    assert peer["prompt"] == native["input_ids"]
    assert len(peer["prompt"]) == 12
    assert (peer["model"], peer["max_tokens"], peer["temperature"]) == ("some/model", 3, 0)
    assert peer["ignore_eos"] is True
    assert "cache_salt" not in peer


@pytest.mark.parametrize(
    ("details", "found"),
    [({"cached_tokens": 7}, (7, True)), ({"cached_tokens": 0}, (0, True)), (None, (0, False))],
)
def test_hits_are_known_where_a_peer_counts_them(monkeypatch, details, found):
    async def events(session, url, payload):
        yield {"choices": [{"token_ids": [3]}]}
        usage = {"prompt_tokens": 12, "completion_tokens": 1, "prompt_tokens_details": details}
        yield {"choices": [], "usage": usage}

    monkeypatch.setattr(completions, "events", events)
    outcome = asyncio.run(completions.ask_completion(None, "http://there", b"", 0.0))
    assert (outcome.hit_tokens, outcome.hits_counted) == found


def test_namespaces_are_kept_apart_in_both_interfaces():
    native = body(namespace="tenant")
    assert native["extra_key"] == "tenant"
    assert completion_body(native, "some/model")["cache_salt"] == "tenant"
