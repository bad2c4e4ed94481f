"""Settings of the knowledge tree, parsed once from SGLang's own flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rag_radix.cost_model import PrefillCostTable
from rag_radix.policies import ReplacementPolicy, make_policy


@dataclass(frozen=True)
class TreeSettings:
    """How a knowledge tree replaces.

    Attributes:
        policy: Ranks nodes in both tiers.
        prefill_cost: Seconds to compute new tokens behind cached ones.
        cost_source: Where `prefill_cost` comes from, for the log.
    """

    policy: ReplacementPolicy
    prefill_cost: PrefillCostTable
    cost_source: str


def parse_settings(
    policy_name: str,
    policy_config: Mapping[str, Any] | None,
    default_cost: Callable[[], PrefillCostTable],
) -> TreeSettings:
    """Build the settings from `--radix-eviction-policy` and its `-config` object.

    The config's `cost_table` names a file for `PrefillCostTable.load`; without it the table
    is `default_cost()`. The other keys belong to the policy.

    Raises:
        ConfigError: Unknown policy or key, or an unusable cost table.
    """
    config = dict(policy_config or {})
    path = config.pop("cost_table", None)
    return TreeSettings(
        policy=make_policy(policy_name, config),
        prefill_cost=default_cost() if path is None else PrefillCostTable.load(path),
        cost_source="the model's shape" if path is None else str(path),
    )
