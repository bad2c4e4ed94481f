from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import orjson
import pytest

from rag_radix.errors import ConfigError
from rag_radix.policies import make_policy
from rag_radix.settings import check_settings, parse_settings, served

from .test_cost_model import TABLE


def test_settings_take_the_cost_table_out_of_the_policy_config(tmp_path):
    path = tmp_path / "cost.json"
    path.write_bytes(
        orjson.dumps({"cached_tokens": [0, 1], "new_tokens": [1, 2], "seconds": [[1, 2], [3, 4]]})
    )
    settings = parse_settings(
        "pgdsf", {"frequency": "node", "cost_table": str(path)}, lambda: TABLE
    )
    assert settings.policy == make_policy("pgdsf", {"frequency": "node"})
    assert settings.prefill_cost(1, 2) == 4
    assert settings.cost_source == str(path)
    default = parse_settings("lru", None, lambda: TABLE)
    assert default.prefill_cost is TABLE
    assert default.cost_source == "the model's shape"


def test_a_server_copies_ahead_what_many_prompts_begin_with_and_a_replay_does_not():
    assert parse_settings("pgdsf", served(None), lambda: TABLE).swap_out == "hot"
    assert parse_settings("pgdsf", served({"swap_out": "eager"}), lambda: TABLE).swap_out == "eager"
    assert parse_settings("pgdsf", None, lambda: TABLE).swap_out == "on_evict"


@pytest.mark.parametrize("key", ["reorder_window", "max_prefill_bs"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "4", None])
def test_a_wrong_number_of_requests_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=f"{key}={value!r}"):
        parse_settings("pgdsf", {key: value}, lambda: TABLE)


def test_reordering_and_speculation_are_on_by_default():
    settings = parse_settings("pgdsf", None, lambda: TABLE)
    assert (settings.reorder_window, settings.max_prefill_bs) == (32, 4)


def test_reordering_and_speculation_can_be_turned_off():
    settings = parse_settings("pgdsf", {"reorder_window": 0, "max_prefill_bs": 0}, lambda: TABLE)
    assert (settings.reorder_window, settings.max_prefill_bs) == (0, 0)


def test_an_unknown_setting_is_named_with_all_that_there_are():
    with pytest.raises(ConfigError) as error:
        parse_settings("pgdsf", {"frequency": "node", "swapout": 1}, lambda: TABLE)
    message = str(error.value)
    assert message.startswith("'swapout' in --radix-eviction-policy-config isn't a setting of")
    known = message.partition("it takes ")[2].split(", ")
    assert {"frequency", "cost_table", "swap_out", "warm", "pin_device_share"} <= set(known)
    for key in set(known) - {"frequency", "cost_table"}:  # each of them is read
        with pytest.raises(ConfigError, match=f"^{key}="):
            parse_settings("pgdsf", {key: [()]}, lambda: TABLE)
    with pytest.raises(ConfigError, match="'nothing' isn't available"):
        parse_settings("nothing", {"a": 1}, lambda: TABLE)


@pytest.mark.parametrize(
    ("policy", "explicit", "config", "problem"),
    [
        ("lru", False, {"frequency": "node"}, None),
        ("lru", True, {"frequency": "node"}, "'frequency' in"),
        ("pgdsf-plus", True, {"swap_out": "never"}, "swap_out='never'"),
        ("pgdsf", True, None, None),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(policy, explicit, config, problem):
    args = SimpleNamespace(
        radix_eviction_policy=policy,
        _radix_eviction_policy_explicitly_set=explicit,
        radix_eviction_policy_config=config,
    )
    with nullcontext() if problem is None else pytest.raises(ConfigError, match=problem):
        check_settings(args)
