from __future__ import annotations

import pytest

from rag_radix.errors import ConfigError
from rag_radix.profile.grid import Point, build_grid


def test_the_grid_reaches_from_nothing_to_the_context():
    grid = build_grid(4096, 1)
    assert grid.cached_tokens == (0, 256, 512, 1024, 2048, 3072, 4080)
    assert grid.new_tokens == (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    assert grid.hit_tokens == (64, 128, 256, 512, 1024, 2048, 4080)


@pytest.mark.parametrize("page_size", [1, 16, 64, 48])
@pytest.mark.parametrize("context", [512, 1000, 8185, 131072])
def test_every_length_fills_pages_and_every_prompt_fits(page_size, context):
    grid = build_grid(context, page_size)
    lengths = (*grid.cached_tokens, *grid.new_tokens, *grid.hit_tokens)
    assert all(length % page_size == 0 for length in lengths)
    points = grid.device_points()
    assert len(points) == len(set(points))
    assert max(point.cached_tokens + point.new_tokens for point in points) <= context
    assert {point.cached_tokens for point in points} >= set(grid.cached_tokens)
    assert {point.new_tokens for point in points} >= set(grid.new_tokens)


def test_what_is_longer_than_the_context_is_left_out():
    points = build_grid(1024, 1).device_points()
    assert Point("device", 512, 512) in points
    assert Point("device", 512, 1024) not in points


def test_a_comparison_computes_the_same_prompt_in_three_ways():
    grid = build_grid(1024, 16)
    assert grid.rest_tokens == 16
    assert grid.cold_point(128) == Point("device", 0, 144)
    assert grid.hit_point(128, "device") == Point("device", 128, 16)
    assert {grid.cold_point(128), grid.hit_point(128, "device")} <= set(grid.device_points())
    assert grid.hit_point(128, "host") not in grid.device_points()


@pytest.mark.parametrize(("context", "page_size"), [(100, 1), (256, 64)])
def test_a_context_too_short_says_what_is_enough(context, page_size):
    with pytest.raises(ConfigError, match="--max-tokens"):
        build_grid(context, page_size)
