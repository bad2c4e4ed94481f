"""Arms by name."""

from __future__ import annotations

import json

import pytest
from rag_radix_benchmarks.arms import STOCK_ARMS, ProgramStyle, parse_arms

from rag_radix.errors import ConfigError


def test_arms_come_in_the_order_asked_for():
    assert [arm.name for arm in parse_arms("knowledge-tree, stock-lru")] == [
        "knowledge-tree",
        "stock-lru",
    ]


def test_settings_of_the_knowledge_tree_become_flags_and_are_expected_of_its_server():
    text = "knowledge-tree:policy=pgdsf-plus:reorder_window=0:swap_out=eager"
    arm, _ = parse_arms(f"{text},stock-lru")
    assert arm.name == text
    config = json.loads(arm.flags[arm.flags.index("--radix-eviction-policy-config") + 1])
    assert config == {"reorder_window": 0, "swap_out": "eager"}
    assert arm.built["eviction_policy"] == "pgdsf-plus"
    assert arm.built["settings"]["reorder_window"] == 0
    assert arm.built["settings"]["swap_out"] == "eager"


def test_an_arm_may_have_a_short_name():
    arm, other = parse_arms("node=knowledge-tree:frequency=node,theirs=stock-lru@http://h")
    assert (arm.name, other.name, other.url) == ("node", "theirs", "http://h")
    assert arm.flags == parse_arms("knowledge-tree:frequency=node,stock-lru")[0].flags


def test_an_arm_may_be_served_already():
    arm, _ = parse_arms("stock-lru@http://localhost:30000/,knowledge-tree")
    assert (arm.name, arm.url) == ("stock-lru", "http://localhost:30000")
    assert arm.built == STOCK_ARMS["stock-lru"].built


def test_how_programs_retrieve_follows_a_plus_and_changes_no_server():
    plain, arm = parse_arms("knowledge-tree,knowledge-tree:policy=lru+speculation+cached_first@h/")
    assert arm.programs == ProgramStyle(speculation=True, order="cached_first")
    assert (arm.name, arm.url) == ("knowledge-tree:policy=lru+speculation+cached_first", "h")
    assert plain.programs == ProgramStyle()
    named, other = parse_arms("faster=knowledge-tree+speculation,stock-lru+canonical")
    assert (named.name, named.flags) == ("faster", plain.flags)
    assert (other.name, other.programs.order) == ("stock-lru+canonical", "canonical")


def test_a_peer_is_named_freely_and_always_has_a_url():
    _, peer = parse_arms("stock-lru,openai:vllm@http://localhost:8000")
    assert (peer.name, peer.url, peer.is_peer) == ("openai:vllm", "http://localhost:8000", True)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        ("stock-lru,stock-mru", "'stock-mru' doesn't exist.*stock-lru"),
        ("stock-lru,stock-lru", "twice"),
        ("stock-lru", "two arms or more"),
        ("stock-lru,openai:vllm", "say where it runs"),
        ("openai:a@http://a,openai:b@http://b", "compared with one of SGLang"),
        ("stock-lru:policy=lfu,knowledge-tree", "only knowledge-tree takes settings"),
        ("stock-lru,knowledge-tree:eager", "reorder_window=0, not 'eager'"),
        ("stock-lru,knowledge-tree:policy=best", "best"),
        ("stock-lru,knowledge-tree:swap_out=never", "swap_out='never'"),
        ("stock-lru,knowledge-tree:windw=3", "windw"),
        ("stock-lru,knowledge-tree+speed", r"\+speed is none of \+speculation"),
        ("stock-lru+speculation,knowledge-tree", "only knowledge-tree"),
        ("stock-lru+cached_first,knowledge-tree", "only knowledge-tree"),
        ("stock-lru,openai:x+canonical@h", "only knowledge-tree"),
    ],
)
def test_a_wrong_arm_is_refused_by_name(names, named):
    with pytest.raises(ConfigError, match=named):
        parse_arms(names)


@pytest.mark.parametrize("arm", STOCK_ARMS.values(), ids=lambda arm: arm.name)
def test_stock_arms_never_select_the_knowledge_tree(arm):
    assert "knowledge-tree" not in arm.flags
    assert arm.built["cache"] in ("UnifiedRadixCache", "RadixCache")
