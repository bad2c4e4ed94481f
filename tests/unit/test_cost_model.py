from __future__ import annotations

import orjson
import pytest

from rag_radix.cost_model import PrefillCostTable, default_cost_table
from rag_radix.errors import ConfigError

TABLE = PrefillCostTable((0, 100, 300), (10, 20, 40), ((1, 2, 4), (3, 4, 8), (5, 8, 16)))


def test_grid_points_are_returned_as_they_are():
    for i, cached in enumerate(TABLE.cached_tokens):
        for j, new in enumerate(TABLE.new_tokens):
            assert TABLE(cached, new) == TABLE.seconds[i][j]


def test_between_grid_points_it_is_bilinear():
    assert TABLE(0, 15) == pytest.approx(1.5)
    assert TABLE(50, 10) == pytest.approx(2.0)
    assert TABLE(50, 15) == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert TABLE(200, 30) == pytest.approx((4 + 8 + 8 + 16) / 4)


def test_beyond_the_grid_the_last_cell_goes_on():
    assert TABLE(0, 80) == pytest.approx(8.0)
    assert TABLE(500, 10) == pytest.approx(7.0)


def test_a_pass_shorter_than_the_shortest_costs_as_much():
    assert TABLE(0, 1) == TABLE(0, 10)
    assert TABLE(100, 5) == TABLE(100, 10)


def test_beyond_a_noisy_profile_no_cost_falls_below_the_border():
    falling = PrefillCostTable((0, 10), (10, 20), ((5, 1), (5, 1)))
    assert falling(0, 1000) == 1
    assert falling(0, 1) > 0
    twisted = PrefillCostTable((0, 10), (10, 20), ((1, 8), (4, 5)))
    assert twisted(1000, 20) == 5
    assert twisted(1000, 1000) == 5


@pytest.mark.parametrize(
    ("cached", "new", "seconds", "message"),
    [
        ((0,), (1, 2), ((1, 1),), "cached_tokens"),
        ((0, 0), (1, 2), ((1, 1), (1, 1)), "cached_tokens"),
        ((0, 5), (2, 1), ((1, 1), (1, 1)), "new_tokens"),
        ((0, 5), (0, 1), ((1, 1), (1, 1)), "new_tokens"),
        ((0, 5), (1, 2), ((1, 1),), "2 x 2"),
        ((0, 5), (1, 2), ((1, 1), (1,)), "2 x 2"),
        ((0, 5), (1, 2), ((1, 1), (1, 0)), "positive"),
    ],
)
def test_a_table_of_the_wrong_shape_says_what_is_wrong(cached, new, seconds, message):
    with pytest.raises(ConfigError, match=message):
        PrefillCostTable(cached, new, seconds)


def test_a_table_is_read_from_json(tmp_path):
    path = tmp_path / "cost.json"
    path.write_bytes(
        orjson.dumps(
            {
                "cached_tokens": TABLE.cached_tokens,
                "new_tokens": TABLE.new_tokens,
                "seconds": TABLE.seconds,
            }
        )
    )
    assert PrefillCostTable.load(path) == TABLE


def test_a_row_that_ends_early_goes_on_as_the_row_above(tmp_path):
    path = tmp_path / "profile.json"
    content = {
        "schema": 1,
        "cached_tokens": [0, 10, 20],
        "new_tokens": [10, 20, 40],
        "seconds": [[1, 2, 5], [2, 3, None], [4, None, None]],
    }
    path.write_bytes(orjson.dumps(content))
    assert PrefillCostTable.load(path).seconds == ((1, 2, 5), (2, 3, 7.5), (4, 6, 15))


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(b'{"schema": 2, "cached_tokens": []}')
    with pytest.raises(ConfigError, match=r"profile\.json.*schema is 2"):
        PrefillCostTable.load(path)


def test_a_table_that_rises_within_the_grid_rises_beyond_it():
    lengths = (1, 5, 10, 15, 20, 39, 40, 41, 80, 1000)
    prefixes = (0, 50, 100, 299, 300, 301, 1000)
    for cached in prefixes:
        costs = [TABLE(cached, new) for new in lengths]
        assert costs == sorted(costs)
        assert costs[0] > 0
    for new in lengths:
        assert [TABLE(cached, new) for cached in prefixes] == sorted(
            TABLE(cached, new) for cached in prefixes
        )


UNUSABLE = [
    None,
    b"{",
    b"[]",
    b'{"cached_tokens": [0, 1]}',
    b"3",
    b'{"cached_tokens": [0, 1], "new_tokens": [1, 2], "seconds": [[null, 1], [1, 1]]}',
    b'{"cached_tokens": [0, 1], "new_tokens": [1, 2], "seconds": [["1", 1], [1, 1]]}',
    b'{"cached_tokens": ["0", 1], "new_tokens": [1, 2], "seconds": [[1, 1], [1, 1]]}',
    b'{"cached_tokens": [0, 1], "new_tokens": [1, 2], "seconds": [[1, 1, 1], [1, 1]]}',
    b'{"cached_tokens": [0, 1], "new_tokens": [1, 2], "seconds": [[1, 1], [0, 1]]}',
]


@pytest.mark.parametrize("content", UNUSABLE)
def test_an_unusable_file_is_named(tmp_path, content):
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cost\.json"):
        PrefillCostTable.load(path)


def test_the_default_grows_with_new_and_with_cached_tokens():
    cost = default_cost_table(
        layers=30, hidden_size=576, intermediate_size=1536, context_tokens=8192
    )
    assert cost.new_tokens[-1] == cost.cached_tokens[-1] == 8192
    assert cost(0, 512) < cost(4096, 512) < cost(4096, 1024)
    # Per token, a longer prefix is dearer and a longer extend spreads the pass over more.
    assert cost(4096, 512) / 512 > cost(0, 512) / 512
    assert cost(0, 16) / 16 > cost(0, 512) / 512
