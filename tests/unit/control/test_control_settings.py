"""Settings of operators' control."""

from __future__ import annotations

from typing import Any

import pytest
from unit.test_cost_model import TABLE

from rag_radix.errors import ConfigError
from rag_radix.settings import TreeSettings, parse_settings


def parse(**config: Any) -> TreeSettings:
    return parse_settings("pgdsf", config, lambda: TABLE)


@pytest.mark.parametrize("key", ["pin_device_share", "pin_host_share"])
@pytest.mark.parametrize("value", [-0.1, 0.91, 1, True, "0.5", None])
def test_a_wrong_share_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=f"{key}={value!r}"):
        parse(**{key: value})


def test_shares_are_taken_as_they_are():
    assert parse(pin_device_share=0).pin_device_share == 0
    assert parse(pin_host_share=0.9).pin_host_share == 0.9


def test_whether_versions_retire_is_true_or_false():
    assert not parse().retire_older_versions
    assert parse(retire_older_versions=True).retire_older_versions
    with pytest.raises(ConfigError, match="retire_older_versions='yes'"):
        parse(retire_older_versions="yes")
