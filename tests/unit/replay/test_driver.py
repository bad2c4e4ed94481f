"""The replayer finds what a server would find, on SGLang's own pools and allocators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rag_radix.errors import ConfigError
from rag_radix.replay.driver import Replayer, in_slots, knowledge_tree_replayer
from rag_radix.replay.prompts import PromptTokens
from rag_radix.replay.reference_cost import a10g_mistral_cost_table
from rag_radix.replay.runs import PolicyVariant, ReplayServer, replay
from rag_radix.replay.server import replay_context
from rag_radix.replay.trace import TraceDocument, TraceRequest
from rag_radix.replay.workloads import generate
from rag_radix.waiting_queue import WaitingQueue

COST = a10g_mistral_cost_table()


def request(
    *documents: str, tokens: int = 64, system: int = 32, question: int = 20, **fields: Any
) -> TraceRequest:
    """Documents by id, or by `id@version`, each of `tokens`."""
    spans, end = [], system
    for name in documents:
        document, _, version = name.partition("@")
        spans.append(TraceDocument(document, version, end, end + tokens))
        end += tokens
    return TraceRequest(0.0, tuple(spans), end + question, **fields)


@contextmanager
def replayer(
    policy: str = "lru", *, device: int = 4096, host: int = 0, **options: Any
) -> Iterator[Replayer]:
    with knowledge_tree_replayer(
        policy,
        {},
        device_tokens=device,
        host_tokens=host,
        longest_request_tokens=8192,
        cost=COST,
        **options,
    ) as it:
        yield it
        it.tree.check_integrity()


def small_trace(requests: int, seed: int = 1, **options: Any) -> list[TraceRequest]:
    return generate(
        "mmlu-like",
        requests=requests,
        seed=seed,
        documents=600,
        mean_document_tokens=200,
        **options,
    )


def test_what_came_before_is_found_on_the_device():
    with replayer() as it:
        assert it.serve(request("a", "b")).hit_tokens == 0
        again = it.serve(request("a", "b"))
        assert (again.device_hit_tokens, again.host_hit_tokens) == (32 + 2 * 64, 0)
        assert (again.document_hit_tokens, again.hit_documents) == (2 * 64, 2)


def test_a_document_is_found_behind_the_same_text_only():
    with replayer() as it:
        it.serve(request("a", "b"))
        assert it.serve(request("a", "c")).document_hit_tokens == 64
        assert it.serve(request("b", "a")).hit_tokens == 32
        assert it.serve(request("a@2", "b")).hit_tokens == 32
        assert it.serve(request("a", "b", system=48)).hit_tokens == 0
        assert it.serve(request("a", "b", namespace="other")).hit_tokens == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_tenants_find_what_precedes_their_salts(page_size):
    with replayer(page_size=page_size) as it:

        def hit(tenant, shared, shared_space=""):
            asked = request("a", "b", namespace=tenant)
            asked = replace(asked, shared_tokens=shared, shared_namespace=shared_space)
            cached = it.cached_tokens(asked)
            assert it.serve(asked).hit_tokens == cached
            return cached

        assert hit("one", 32 + 64) == 0
        assert hit("two", 32 + 64) == 32 + 64
        assert hit("one", 32 + 64) == hit("two", 32 + 64) == 32 + 2 * 64
        assert hit("three", 32) == 32
        assert hit("one", 0) == 0
        assert hit("", 0) == 32 + 64
        assert hit("adapter", 0, "adapter") == 0
        assert hit("one with it", 32 + 64, "adapter") == 32 + 64


def test_a_question_is_never_found_again():
    with replayer(page_size=1) as it:
        for _ in range(3):
            hit = it.serve(request("a", question=200, output_tokens=9)).hit_tokens
        assert hit == 32 + 64


def test_what_left_the_device_is_loaded_back_from_host():
    with replayer(device=512, host=4096) as it:
        it.serve(request("a", tokens=160))
        pushed_out = [it.serve(request(name, tokens=160)) for name in "bcde"]
        assert sum(each.swapped_out_tokens for each in pushed_out) >= 160
        again = it.serve(request("a", tokens=160))
        assert again.document_hit_tokens == 160
        assert again.host_hit_tokens >= 160


def test_little_memory_is_enough(monkeypatch):
    available = SimpleNamespace(available=8 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    with replayer(device=512, host=4096) as it:
        assert it.tree.cache_controller.mem_pool_host.size == 4096 // 16


def test_a_request_longer_than_the_device_tier_is_refused():
    with replayer(device=128) as it, pytest.raises(ConfigError, match="128"):
        it.serve(request("a", "b", "c"))


@pytest.mark.parametrize("host", [0, 4096])
def test_a_slot_for_a_page_finds_what_single_tokens_find(host):
    trace = small_trace(300, output_tokens=20)
    outcomes = []
    for granularity in (1, 16):
        with replayer(device=2048, host=host, granularity=granularity) as it:
            outcomes.append(list(it.run(trace)))
    assert outcomes[0] == outcomes[1]
    assert sum(each.hit_documents for each in outcomes[0]) > 50


def test_whole_pages_find_nearly_what_single_tokens_find():
    trace = small_trace(400)
    rates = []
    for page_size in (1, 16):
        server = ReplayServer(4096, 8192, page_size=page_size)
        rates.append(replay(trace, PolicyVariant("p", "pgdsf"), server).token_hit_rate)
    assert rates[0] == pytest.approx(rates[1], abs=0.01)
    assert rates[0] > 0.1


def test_sglangs_own_cache_is_replayed_as_well():
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    with replay_context(device_tokens=4096, host_tokens=0, longest_request_tokens=1024) as context:
        it = Replayer(create_unified_radix_cache(context))
        it.serve(request("a", "b"))
        assert it.serve(request("a", "b")).hit_tokens == 32 + 2 * 64


def test_a_policy_sees_the_requests_that_wait():
    trace = [request(name) for name in "abcdef"]
    with replayer() as it:
        seen = []
        for _ in it.run(trace, queue=3):
            waiting = [req.sampling_params.custom_params["rag"] for req in it.tree.waiting()]
            seen.append("".join(rag["documents"][0]["id"] for rag in waiting))
    assert seen == ["bcd", "cde", "def", "ef", "f", ""]


def test_equal_texts_have_equal_tokens_and_no_others_do():
    texts = PromptTokens(1)
    first = texts.prompt(request("a", "b", question=9))
    second = texts.prompt(request("a", "c", question=9))
    shared = 32 + 64
    assert first.ids[:shared] == second.ids[:shared]
    assert not set(first.ids[shared:]) & set(second.ids[shared:])
    assert len(set(first.ids)) == len(first.ids)


def test_a_slot_is_known_by_all_texts_that_begin_in_it():
    def prompt(*lengths: tuple[str, int]) -> Any:
        end, spans = 0, []
        for name, tokens in lengths:
            spans.append(TraceDocument(name, "", end, end + tokens))
            end += tokens
        return texts.prompt(TraceRequest(0.0, tuple(spans), end + 16)).ids

    texts = PromptTokens(16)
    # Five tokens of a or b, then c: the first slot ends in c in both cases.
    assert prompt(("a", 5), ("c", 60))[0] != prompt(("b", 5), ("c", 60))[0]
    assert prompt(("a", 5), ("c", 60))[:4] == prompt(("a", 5), ("c", 60))[:4]
    # The same document in another place within a page is cut into other pages.
    assert not set(prompt(("a", 16), ("c", 60))[1:4]) & set(prompt(("a", 20), ("c", 60))[1:4])


@pytest.mark.parametrize("seed", range(3))
def test_slots_partition_a_prompt_as_pages_do(seed):
    rng = random.Random(seed)
    end, spans = 0, []
    for name in "abcdefgh":
        start = end + rng.choice([0, 3, 16, 40])
        end = start + rng.choice([1, 5, 16, 31, 100])
        spans.append(TraceDocument(name, "", start, end))
    trace_request = TraceRequest(0.0, tuple(spans), end + rng.randrange(1, 40), output_tokens=7)
    slots, tokens = PromptTokens(16).prompt(trace_request), PromptTokens(1).prompt(trace_request)
    assert len(slots.ids) == len(tokens.ids) // 16
    assert slots.prompt_slots == tokens.prompt_slots // 16
    assert slots.matchable_slots == tokens.matchable_slots // 16
    assert len(set(slots.ids)) == len(slots.ids)


def test_costs_in_slots_are_the_costs_of_their_tokens():
    slots = in_slots(COST, 16)
    for cached, new in ((0, 512), (1024, 2048), (4096, 512), (4096, 16_384)):
        assert slots(cached // 16, new // 16) == pytest.approx(COST(cached, new))
    assert slots(100, 50) == pytest.approx(COST(1600, 800), rel=1e-3)


def test_two_documents_in_turn_with_room_for_one_are_found_two_times_in_three():
    """The first example of RAGCache's section on cache-aware reordering."""
    trace = [request(name, tokens=160, system=0) for name in "ababab"]

    def hit_documents(window: int) -> int:
        # Room for a document, its question and SGLang's spare page, but not for two documents.
        with replayer(device=256) as it:
            order = WaitingQueue(it.tree, window, load_share=0.0) if window else None
            return sum(outcome.hit_documents for outcome in it.run(trace, 5, order))

    assert hit_documents(window=0) == 0
    assert hit_documents(window=32) == 4


def test_reordering_serves_everybody_and_nobody_later_than_the_window_allows():
    trace = small_trace(200)
    with replayer(device=2048, host=4096) as it:
        order = WaitingQueue(it.tree, 4, load_share=0.1)
        outcomes = list(it.run(trace, 40, order))
        lengths = sorted(outcome.prompt_tokens for outcome in outcomes)
        assert lengths == sorted(each.prompt_tokens for each in trace)
        assert order.report()["most_overtakings"] == 4
