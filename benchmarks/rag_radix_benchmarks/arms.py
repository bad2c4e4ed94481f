"""The arms of a comparison: server configurations by name, and what is true of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from rag_radix_frontend.ordering import Order

from rag_radix.comparison import RADIX_CACHE_BACKEND, stated_settings
from rag_radix.cost_model import default_cost_table
from rag_radix.errors import ConfigError
from rag_radix.names import BACKEND
from rag_radix.policies import DEFAULT_POLICY
from rag_radix.settings import parse_settings, served

KNOWLEDGE_TREE = "knowledge-tree"
NO_CACHE = "no-cache"
PEER = "openai"
SPECULATION = "speculation"


@dataclass(frozen=True)
class ProgramStyle:
    """How the programs of an arm retrieve, where the load is programs.

    Attributes:
        speculation: Whether they generate while they search.
        order: Of their documents.
    """

    speculation: bool = False
    order: Order = "score"


@dataclass(frozen=True)
class Arm:
    """One way to serve, beside what all arms of a comparison have in common.

    Attributes:
        name: As asked for, settings included.
        flags: Of `sglang serve`.
        host_tier: Whether it has one.
        built: What a server of this arm says of itself, by the keys of
            `rag_radix.comparison.observed`.
        url: Of a server that is already running; None to start one.
        is_peer: Whether it is another server than SGLang, of the OpenAI interface.
        programs: How its programs retrieve.
    """

    name: str
    flags: tuple[str, ...]
    host_tier: bool = False
    built: Mapping[str, object] = field(default_factory=dict)
    url: str | None = None
    is_peer: bool = False
    programs: ProgramStyle = ProgramStyle()


def parse_arms(names: str) -> list[Arm]:
    """Arms from a list like `stock-lru,knowledge-tree:policy=pgdsf-plus`, in its order.

    `knowledge-tree` takes settings behind colons: `policy` is its replacement policy, the others
    belong into `--radix-eviction-policy-config`; a value is JSON or, when it isn't, a string.
    `NAME@URL` is an arm that is served at that URL already; `openai:NAME@URL` one of any name
    and any server of the OpenAI completions interface. `LABEL=` before any of these is what the
    arm is called in reports. `+speculation`, `+canonical` and `+cached_first` behind settings say
    how the arm's programs retrieve.

    Raises:
        ConfigError: An unknown arm or setting, or the same arm twice.
    """
    arms = [_parse(name.strip()) for name in names.split(",") if name.strip()]
    if len({arm.name for arm in arms}) < len(arms):
        raise ConfigError(f"--arms {names!r} has an arm twice")
    if len(arms) < 2:
        raise ConfigError(f"--arms {names!r}: a comparison takes two arms or more")
    if all(arm.is_peer for arm in arms):
        raise ConfigError(f"--arms {names!r}: {PEER} arms are compared with one of SGLang")
    return arms


def _parse(text: str) -> Arm:
    label, equals, named = text.partition("=")
    if equals and ":" not in label:
        return replace(_parse(named), name=label)
    text, _, url = text.partition("@")
    served, *styles = text.split("+")
    name, *settings = served.split(":")
    if name == PEER:
        if not url:
            raise ConfigError(f"--arms {text!r}: say where it runs, like {PEER}:vllm@http://HOST")
        arm = Arm(text, flags=(), is_peer=True)
    elif name == KNOWLEDGE_TREE:
        arm = _knowledge_tree(text, dict(map(_setting, settings)))
    elif name not in STOCK_ARMS:
        known = ", ".join([*STOCK_ARMS, KNOWLEDGE_TREE])
        raise ConfigError(f"--arms {name!r} doesn't exist: use some of {known}")
    elif settings:
        raise ConfigError(f"--arms {text!r}: only {KNOWLEDGE_TREE} takes settings")
    else:
        arm = STOCK_ARMS[name]
    return replace(arm, name=text, url=url.rstrip("/") or None, programs=_style(text, arm, styles))


def _style(text: str, arm: Arm, styles: list[str]) -> ProgramStyle:
    orders: tuple[Order, ...] = get_args(Order)
    known = (SPECULATION, *orders)
    for each in styles:
        if each not in known:
            known_styles = ", ".join(f"+{name}" for name in known)
            raise ConfigError(f"--arms {text!r}: +{each} is none of {known_styles}")
    style = ProgramStyle(
        SPECULATION in styles, next((order for order in orders if order in styles), "score")
    )
    needs_tree = style.speculation or style.order == "cached_first"
    if (arm.is_peer and styles) or (needs_tree and arm.built.get("cache") != "KnowledgeTree"):
        raise ConfigError(f"--arms {text!r}: only {KNOWLEDGE_TREE} can have +{'+'.join(styles)}")
    return style


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(
            f"--arms: write settings like {KNOWLEDGE_TREE}:reorder_window=0, not {text!r}"
        )
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _knowledge_tree(name: str, config: dict[str, Any]) -> Arm:
    policy = config.pop("policy", DEFAULT_POLICY)
    shape = {"layers": 1, "hidden_size": 1, "intermediate_size": 1, "context_tokens": 4096}
    # Found wrong here instead of by a server that takes half a minute to say so.
    settings = parse_settings(policy, served(config), lambda: default_cost_table(**shape))
    flags = ["--radix-cache-backend", BACKEND, "--radix-eviction-policy", policy]
    if config:
        flags += ["--radix-eviction-policy-config", json.dumps(config)]
    built = {
        "cache": "KnowledgeTree",
        "tree_core": "KnowledgeTreeCore",
        "caching": True,
        "eviction_policy": policy,
        "order": "fcfs",
        "settings": stated_settings(settings),
    }
    return Arm(name, tuple(flags), host_tier=True, built=built)


def _stock(
    name: str,
    *,
    policy: str = "lru",
    order: str = "fcfs",
    write_policy: str | None = None,
) -> Arm:
    flags = ["--radix-eviction-policy", policy, "--schedule-policy", order]
    if write_policy is not None:
        flags += ["--hicache-write-policy", write_policy]
    built = {
        "cache": "UnifiedRadixCache",
        "tree_core": "RustUnifiedTreeCore",
        "caching": True,
        "eviction_policy": policy,
        "order": order,
        "write_policy": write_policy,
        "settings": None,
    }
    return Arm(name, tuple(flags), write_policy is not None, built)


def _stock_radix_cache() -> Arm:
    arm = _stock("stock-radixcache-lru")
    return replace(
        arm,
        flags=(*arm.flags, "--radix-cache-backend", RADIX_CACHE_BACKEND),
        built={**arm.built, "cache": "RadixCache", "tree_core": None},
    )


def _no_cache() -> Arm:
    arm = _stock(NO_CACHE)
    return replace(
        arm, flags=(*arm.flags, "--disable-radix-cache"), built={**arm.built, "caching": False}
    )


STOCK_ARMS = {
    arm.name: arm
    for arm in (
        _no_cache(),
        _stock("stock-lru"),
        _stock("stock-lpm", order="lpm"),
        _stock_radix_cache(),
        _stock("stock-hicache", write_policy="write_through"),
        _stock("stock-hicache-selective", write_policy="write_through_selective"),
        _stock("stock-hicache-write-back", write_policy="write_back"),
        _stock("stock-hicache-slru", write_policy="write_through", policy="slru"),
        _stock("stock-hicache-lfu", write_policy="write_through", policy="lfu"),
        _stock("stock-hicache-lpm", write_policy="write_through", order="lpm"),
        _stock("stock-hicache-hrrn", write_policy="write_through", order="hrrn"),
    )
}
"""SGLang without the knowledge tree: no cache at all, its caches without a host tier, and its
hierarchical cache by write policy, replacement and order of the queue."""
