"""A server that isn't what its arm says is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rag_radix_benchmarks.arms import STOCK_ARMS, parse_arms
from rag_radix_benchmarks.facts import ServerFacts, WrongArmError
from rag_radix_benchmarks.verify import verify, verify_alike
from unit.benchmarks.comparison_data import SETUP, facts_of

TREE = parse_arms("stock-lru,knowledge-tree")[1]
ARMS = [*STOCK_ARMS.values(), TREE]
HICACHE = STOCK_ARMS["stock-hicache"]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_server_that_is_its_arm_passes(arm):
    verify(arm, SETUP, facts_of(arm))


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cache", "ChunkCache"),
        ("tree_core", "UnifiedTreeCore"),
        ("eviction_policy", "priority"),
        ("order", "random"),
        ("device_tokens", 8000),
        ("host_tokens", 32000),
        ("page_size", 1),
        ("chunk_tokens", 512),
        ("running_requests", 8),
        ("model", "another/model"),
        ("attention_backend", "torch_native"),
    ],
)
def test_a_server_that_differs_in_one_thing_is_refused(arm, key, value):
    with pytest.raises(WrongArmError, match=rf"{arm.name} isn't that arm: {key} is '?{value}"):
        verify(arm, SETUP, facts_of(arm, **{key: value}))


def test_a_server_without_a_cache_is_no_server_with_one():
    with pytest.raises(WrongArmError, match="caching is False, not True"):
        verify(STOCK_ARMS["stock-lru"], SETUP, facts_of(STOCK_ARMS["no-cache"]))


def test_another_write_policy_is_refused():
    selective = STOCK_ARMS["stock-hicache-selective"]
    with pytest.raises(WrongArmError, match="write_policy is 'write_through_selective'"):
        verify(HICACHE, SETUP, facts_of(selective))


def test_a_host_tier_where_none_is_expected_is_refused():
    with pytest.raises(WrongArmError, match="host_tokens is 16, not 0"):
        verify(STOCK_ARMS["stock-lru"], SETUP, facts_of(STOCK_ARMS["stock-lru"], host_tokens=16))


def test_a_setting_of_the_tree_that_differs_is_refused():
    other = parse_arms("stock-lru,knowledge-tree:max_depth=2")[1]
    with pytest.raises(WrongArmError, match=r"settings is .*'max_depth': 2.*, not .*None"):
        verify(TREE, SETUP, facts_of(other))


def test_all_that_is_wrong_is_named():
    with pytest.raises(WrongArmError, match=r"cache is 'UnifiedRadixCache'.*; host_tokens is 0"):
        verify(TREE, SETUP, facts_of(STOCK_ARMS["stock-lru"]))


def test_a_folder_is_the_same_model_in_any_spelling(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    setup = SETUP.__class__(**{**vars(SETUP), "model_path": str(folder)})
    facts = facts_of(HICACHE, model=str(tmp_path / "." / "x" / ".." / "model"))
    (tmp_path / "x").mkdir()
    verify(HICACHE, setup, facts)


@pytest.mark.parametrize(
    ("flags", "passes"),
    [
        ((), True),
        (("--dtype", "auto"), True),
        (("--dtype", "bfloat16"), True),
        (("--dtype", "bfloat16", "--dtype", "float"), False),
    ],
)
def test_the_type_that_was_asked_for_is_that_of_the_server(flags, passes):
    setup = replace(SETUP, more_flags=flags)
    if passes:
        verify(TREE, setup, facts_of(TREE))
    else:
        with pytest.raises(WrongArmError, match=r"dtype is 'torch.bfloat16', not 'torch.float32'"):
            verify(TREE, setup, facts_of(TREE))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention", "TorchNativeAttnBackend"),
        ("dtype", "torch.float32"),
        ("kv_dtype", "torch.float8_e5m2"),
        ("tp_size", 2),
    ],
)
def test_all_arms_compute_alike(key, value):
    theirs = facts_of(HICACHE)
    verify_alike(TREE, facts_of(TREE), HICACHE, theirs)
    with pytest.raises(
        WrongArmError, match=f"isn't served as stock-hicache is: {key} is '?{value}"
    ):
        verify_alike(TREE, facts_of(TREE, **{key: value}), HICACHE, theirs)
    peer = parse_arms("stock-lru,openai:vllm@http://localhost:8000")[1]
    verify_alike(peer, ServerFacts("hub/model", "", {}), HICACHE, theirs)


def test_a_peer_is_known_by_its_model_alone():
    peer = parse_arms("stock-lru,openai:vllm@http://localhost:8000")[1]
    verify(peer, SETUP, ServerFacts("hub/model", "", {}))
    with pytest.raises(WrongArmError, match="has the model 'hub/other', not 'model'"):
        verify(peer, SETUP, ServerFacts("hub/other", "", {}))
