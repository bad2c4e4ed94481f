"""Replacement policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rag_radix.errors import ConfigError
from rag_radix.policies.adaptive import Adaptive
from rag_radix.policies.base import ReplacementPolicy
from rag_radix.policies.gdsf import Gdsf
from rag_radix.policies.lfu import Lfu
from rag_radix.policies.lru import Lru
from rag_radix.policies.pgdsf import Pgdsf
from rag_radix.policies.pgdsf_plus import PgdsfPlus
from rag_radix.policies.s3_fifo import S3Fifo
from rag_radix.policies.slru import Slru
from rag_radix.policies.w_tinylfu import WTinyLfu

_POLICIES: tuple[type[ReplacementPolicy], ...] = (
    Adaptive,
    Gdsf,
    Lfu,
    Lru,
    Pgdsf,
    PgdsfPlus,
    S3Fifo,
    Slru,
    WTinyLfu,
)
POLICIES = {policy.name: policy for policy in _POLICIES}
DEFAULT_POLICY = Pgdsf.name

__all__ = ["DEFAULT_POLICY", "POLICIES", "ReplacementPolicy", "make_policy"]


def make_policy(name: str, config: Mapping[str, Any]) -> ReplacementPolicy:
    """Build a policy from its name and its keyword arguments.

    Raises:
        ConfigError: Unknown name or argument; the message lists the valid ones.
    """
    try:
        policy = POLICIES[name]
    except KeyError:
        raise ConfigError(
            f"--radix-eviction-policy {name!r} isn't available with the knowledge tree: "
            f"use one of {', '.join(sorted(POLICIES))}"
        ) from None
    known = [field.name for field in fields(policy)]  # type: ignore[arg-type]
    for key in config:
        if key not in known:
            raise ConfigError(
                f"{key!r} in --radix-eviction-policy-config isn't a setting of {name!r}: "
                f"its settings are {', '.join(known) or 'none'}"
            )
    return policy(**config)
