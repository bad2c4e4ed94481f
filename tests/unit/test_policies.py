from __future__ import annotations

import inspect

import pytest

from rag_radix.errors import ConfigError
from rag_radix.policies import POLICIES, make_policy
from rag_radix.policies.base import Clock
from rag_radix.settings import parse_settings
from rag_radix.statistics import DocumentFrequencies, DocumentKey, NodeStatistics

from .test_cost_model import TABLE


def used(frequency=1, document_frequency=0, cost=0.5, samples=1, last_access=0):
    return NodeStatistics(frequency, document_frequency, cost, samples, last_access)


class TestContract:
    """What every policy promises."""

    @pytest.fixture(params=sorted(POLICIES))
    def policy(self, request):
        return make_policy(request.param, {})

    def test_asking_changes_nothing(self, policy):
        statistics = used()
        before = statistics.copy()
        clock = Clock(now=5, evicted=3.0)
        assert policy.priority(statistics, clock) == policy.priority(statistics, clock)
        assert statistics == before

    def test_it_is_named_as_it_is_chosen(self, policy):
        assert POLICIES[policy.name] is type(policy)

    def test_a_later_use_never_ranks_lower(self, policy):
        earlier = policy.priority(used(frequency=1, last_access=5), Clock(5, 1.0))
        later = policy.priority(used(frequency=2, last_access=9), Clock(9, 1.5))
        assert later > earlier

    def test_it_sees_statistics_and_clock_only(self, policy):
        assert list(inspect.signature(policy.priority).parameters) == ["statistics", "clock"]

    def test_a_node_never_used_ranks_lowest(self, policy):
        clock = Clock(1, 2.0)
        assert policy.priority(NodeStatistics(), clock) < policy.priority(
            used(last_access=1), clock
        )


class TestPgdsf:
    def test_the_papers_formula(self):
        statistics = used(frequency=3, cost=0.5 + 0.7, samples=2)
        assert make_policy("pgdsf", {}).priority(statistics, Clock(evicted=10.0)) == pytest.approx(
            10 + 3 * 0.6
        )

    def test_frequency_of_the_document_or_of_the_place(self):
        statistics = used(frequency=1, document_frequency=9, cost=1.0)
        by = {f: make_policy("pgdsf", {"frequency": f}) for f in ("document", "node")}
        assert by["document"].priority(statistics, Clock()) == 9.0
        assert by["node"].priority(statistics, Clock()) == 1.0

    def test_a_shared_head_counts_all_who_read_it(self):
        statistics = used(frequency=5, document_frequency=2, cost=1.0)
        assert make_policy("pgdsf", {}).priority(statistics, Clock()) == 5.0

    def test_a_dearer_token_stays_longer(self):
        policy = make_policy("pgdsf", {})
        assert policy.priority(used(cost=2.0), Clock()) > policy.priority(used(cost=1.0), Clock())


def test_lru_ranks_by_last_access_whatever_the_clock():
    policy = make_policy("lru", {})
    assert policy.priority(used(frequency=99, last_access=3), Clock(evicted=100.0)) == 3.0


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("slru", {}, "use one of lru, pgdsf"),
        ("pgdsf", {"frequncy": "node"}, "'frequncy'.*frequency"),
        ("pgdsf", {"frequency": "both"}, "frequency='both'.*'document' or 'node'"),
        ("lru", {"frequency": "node"}, "its settings are none"),
    ],
)
def test_a_wrong_policy_or_setting_lists_the_right_ones(name, config, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(name, config)


def test_settings_take_the_cost_table_out_of_the_policy_config(tmp_path):
    import orjson

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


def test_document_frequencies_forget_the_least_recently_retrieved_first():
    counts = DocumentFrequencies(capacity=2)
    a, b, c = (DocumentKey(name) for name in "abc")
    assert [counts.record(key) for key in (a, b, a, c)] == [1, 1, 2, 1]
    assert len(counts) == 2
    assert counts.record(a) == 3
    assert counts.record(b) == 1
