"""Settings of the knowledge tree, parsed once from SGLang's own flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rag_radix.cost_model import PrefillCostTable
from rag_radix.errors import ConfigError
from rag_radix.policies import DEFAULT_POLICY, POLICIES, ReplacementPolicy, make_policy

SwapOutMode = Literal["on_evict", "hot", "eager"]

DEFAULT_REORDER_WINDOW = 32
# Requests prefilled together, as in the RAGCache paper's experiments.
DEFAULT_MAX_PREFILL_BS = 4

DEFAULT_PIN_DEVICE_SHARE = 0.25
DEFAULT_PIN_HOST_SHARE = 0.5
MAX_PIN_SHARE = 0.9

DEFAULT_STORE_AFTER = 2
DEFAULT_PRELOAD_HOST_SHARE = 0.5


@dataclass(frozen=True)
class TreeSettings:
    """How a knowledge tree replaces.

    Attributes:
        policy: Ranks nodes in both tiers.
        prefill_cost: Seconds to compute new tokens behind cached ones.
        cost_source: Where `prefill_cost` comes from, for the log.
        swap_out: When a document is copied to host: at its eviction; with "hot" what many prompts
            begin with ahead of that, to keep the copy, as in every server (`served`) and always
            with a storage backend; with "eager" all that, and every document after its prefill, so
            that an eviction never waits.
        max_depth: Documents of a prompt that get nodes of their own; None for all.
        trace: File to which each request is appended, without texts.
        reorder_window: How many younger requests may be served before a waiting one; 0
            serves them as `--schedule-policy` says.
        max_prefill_bs: Waiting requests from which on speculative ones are refused.
        retire_older_versions: Whether a request with a newer version of a document lets its
            older ones be found no more.
        pin_device_share, pin_host_share: How much of each tier pinned documents may take.
        warm: File with the body of `POST /rag/warm`, carried out once the server is up.
        store_after: With a storage backend, retrievals of a node from which on it is copied to
            host and written ahead of its eviction.
        storage_gib: What the files of storage may take, all ranks together; None for no limit.
        preload_host_share: How full the host tier may get by what is loaded from files after a
            start, before anybody asks for it.
    """

    policy: ReplacementPolicy
    prefill_cost: PrefillCostTable
    cost_source: str
    swap_out: SwapOutMode = "on_evict"
    max_depth: int | None = None
    trace: str | None = None
    reorder_window: int = DEFAULT_REORDER_WINDOW
    max_prefill_bs: int = DEFAULT_MAX_PREFILL_BS
    retire_older_versions: bool = False
    pin_device_share: float = DEFAULT_PIN_DEVICE_SHARE
    pin_host_share: float = DEFAULT_PIN_HOST_SHARE
    warm: str | None = None
    store_after: int = DEFAULT_STORE_AFTER
    storage_gib: float | None = None
    preload_host_share: float = DEFAULT_PRELOAD_HOST_SHARE


_NO_KEYS = ("policy", "prefill_cost", "cost_source")
_TREE_KEYS = ("cost_table", *(f.name for f in fields(TreeSettings) if f.name not in _NO_KEYS))


def parse_settings(
    policy_name: str,
    policy_config: Mapping[str, Any] | None,
    default_cost: Callable[[], PrefillCostTable],
) -> TreeSettings:
    """Build the settings from `--radix-eviction-policy` and its `-config` object.

    `cost_table` of the config names a file for `PrefillCostTable.load`; without it the table
    is `default_cost()`. `swap_out`, `max_depth`, `trace`, `reorder_window`, `max_prefill_bs`,
    `retire_older_versions`, `warm`, `store_after`, `storage_gib`, `preload_host_share` and the
    `pin_` shares are those of `TreeSettings`. The other keys belong to the policy.

    Raises:
        ConfigError: Unknown policy or key, a wrong value, or an unusable cost table.
    """
    config = dict(policy_config or {})
    path = config.pop("cost_table", None)
    swap_out = config.pop("swap_out", "on_evict")
    if swap_out not in get_args(SwapOutMode):
        raise _wrong("swap_out", swap_out, "use 'on_evict', 'hot' or 'eager'")
    max_depth = config.pop("max_depth", None)
    if max_depth is not None and (type(max_depth) is not int or max_depth < 1):
        raise _wrong("max_depth", max_depth, "give a number of documents of at least 1, or null")
    trace = config.pop("trace", None)
    if trace is not None and not isinstance(trace, str):
        raise _wrong("trace", trace, "give the name of a file")
    shares = {
        "pin_device_share": config.pop("pin_device_share", DEFAULT_PIN_DEVICE_SHARE),
        "pin_host_share": config.pop("pin_host_share", DEFAULT_PIN_HOST_SHARE),
    }
    for key, share in shares.items():
        if type(share) not in (int, float) or not 0 <= share <= MAX_PIN_SHARE:
            raise _wrong(key, share, f"give a share of the tier from 0 to {MAX_PIN_SHARE}")
    warm = config.pop("warm", None)
    if warm is not None and not (isinstance(warm, str) and Path(warm).is_file()):
        raise _wrong("warm", warm, "give the name of a file that there is")
    retire_older = config.pop("retire_older_versions", False)
    if not isinstance(retire_older, bool):
        raise _wrong("retire_older_versions", retire_older, "use true or false")
    counts = {
        "reorder_window": config.pop("reorder_window", DEFAULT_REORDER_WINDOW),
        "max_prefill_bs": config.pop("max_prefill_bs", DEFAULT_MAX_PREFILL_BS),
    }
    for key, count in counts.items():
        if type(count) is not int or count < 0:
            raise _wrong(key, count, "give a number of requests, 0 for none")
    store_after = config.pop("store_after", DEFAULT_STORE_AFTER)
    if type(store_after) is not int or store_after < 1:
        raise _wrong("store_after", store_after, "give a number of retrievals of at least 1")
    storage_gib = config.pop("storage_gib", None)
    if storage_gib is not None and not (type(storage_gib) in (int, float) and storage_gib > 0):
        raise _wrong("storage_gib", storage_gib, "give a positive number of GiB, or null")
    preload_share = config.pop("preload_host_share", DEFAULT_PRELOAD_HOST_SHARE)
    if type(preload_share) not in (int, float) or not 0 <= preload_share <= 1:
        raise _wrong("preload_host_share", preload_share, "give a share of the tier from 0 to 1")
    return TreeSettings(
        policy=_policy(policy_name, config),
        prefill_cost=default_cost() if path is None else PrefillCostTable.load(path),
        cost_source="the model's shape" if path is None else str(path),
        swap_out=swap_out,
        max_depth=max_depth,
        trace=trace,
        retire_older_versions=retire_older,
        **shares,
        warm=warm,
        store_after=store_after,
        storage_gib=storage_gib,
        preload_host_share=preload_share,
        **counts,
    )


def served(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config of a server, where what many prompts begin with always has a host copy unless
    something else is said. A replay has no use for that: the copy spares a wait, not tokens."""
    return {"swap_out": "hot", **(config or {})}


def policy_name(args: Any) -> str:
    """Which policy SGLang's `ServerArgs` choose; ours where they say nothing."""
    name: str = args.radix_eviction_policy
    explicit = args._radix_eviction_policy_explicitly_set
    return DEFAULT_POLICY if name == "lru" and not explicit else name


def check_settings(args: Any) -> None:
    """Check what SGLang's `ServerArgs` set of ours, before anything is loaded.

    Raises:
        ConfigError: See `parse_settings`.
    """
    unused = PrefillCostTable((0, 1), (1, 2), ((1.0, 1.0), (1.0, 1.0)))
    parse_settings(policy_name(args), args.radix_eviction_policy_config, lambda: unused)


def _policy(name: str, config: Mapping[str, Any]) -> ReplacementPolicy:
    if name in POLICIES:
        own = [field.name for field in fields(POLICIES[name])]  # type: ignore[arg-type]
        unknown = [key for key in config if key not in own]
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r:.60} in --radix-eviction-policy-config isn't a setting of "
                f"{name!r}: it takes {', '.join([*own, *_TREE_KEYS])}"
            )
    return make_policy(name, config)


def _wrong(key: str, value: Any, remedy: str) -> ConfigError:
    return ConfigError(f"{key}={value!r:.60} in --radix-eviction-policy-config: {remedy}")
