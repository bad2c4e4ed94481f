from __future__ import annotations

import re
from pathlib import Path

import pytest

from rag_radix.errors import ConfigError
from rag_radix.policies import POLICIES, make_policy
from rag_radix.policies.base import Clock

from .nodes import used


def test_the_rivals_of_the_papers_policy_are_there():
    rivals = {"adaptive", "gdsf", "lfu", "lru", "s3-fifo", "slru", "w-tinylfu"}
    assert rivals | {"pgdsf"} <= set(POLICIES)


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=f"'mru'.*use one of {', '.join(sorted(POLICIES))}$"):
        make_policy("mru", {})


def test_settings_reach_the_policy():
    assert make_policy("slru", {"protected_threshold": 3}).protected_threshold == 3


def test_a_policy_without_settings_says_so():
    with pytest.raises(ConfigError, match="its settings are none"):
        make_policy("lru", {"frequency": "node"})


def test_the_example_for_contributors_is_a_policy():
    guide = Path(__file__).parents[3] / "CONTRIBUTING.md"
    (example,) = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    names = {"__name__": __name__}
    exec(example, names)
    policy = names["Fifo"]()
    assert policy.rank(used(inserted_at=3), Clock(9)).floor == 3.0
