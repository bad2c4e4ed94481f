from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

from rag_radix.policies import make_policy
from rag_radix.policies.base import Clock

from .nodes import used


@pytest.fixture(scope="module")
def sglang_strategies():
    """SGLang's module of them, which imports nothing, without the packages around it."""
    package = find_spec("sglang").submodule_search_locations[0]
    path = Path(package, "srt", "mem_cache", "evict_policy.py")
    spec = spec_from_file_location("evict_policy", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("threshold", [1, 2, 4])
def test_nodes_leave_in_the_order_of_sglangs_own_strategy(threshold, sglang_strategies):
    nodes = [
        used(frequency=frequency, last_access=last_access)
        for frequency in range(6)
        for last_access in (1, 10**12, 7)
    ]
    strategy = sglang_strategies.SLRUStrategy(threshold)
    policy = make_policy("slru", {"protected_threshold": threshold})

    def theirs(node):
        return strategy.get_priority(
            SimpleNamespace(hit_count=node.frequency, last_access_time=node.last_access)
        )

    def ours(node):
        return policy.priority(node, Clock(10**12))

    assert sorted(nodes, key=ours) == sorted(nodes, key=theirs)
