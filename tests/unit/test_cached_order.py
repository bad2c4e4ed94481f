from __future__ import annotations

from itertools import chain, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_radix.cached_order import Cached, cached_first

PREFIX = [1, 2, 3]
DOCUMENTS = [list(range(100 * n, 100 * n + 4 + n)) for n in range(1, 5)]


def prompt(order):
    return PREFIX + list(chain.from_iterable(DOCUMENTS[index] for index in order))


def cache_of(*prompts, page_size=1):
    def look_up(order):
        ids = prompt(order)
        best = 0
        for cached in prompts:
            common = 0
            while common < min(len(ids), len(cached)) and ids[common] == cached[common]:
                common += 1
            best = max(best, common // page_size * page_size)
        return Cached(best, best >= len(ids) // page_size * page_size)

    return look_up


def test_nothing_cached_keeps_the_order():
    assert cached_first(4, cache_of()) == ([0, 1, 2, 3], 0)


def test_a_prefix_alone_keeps_the_order():
    assert cached_first(4, cache_of(PREFIX)) == ([0, 1, 2, 3], 3)


def test_the_longest_cached_path_comes_first():
    cache = cache_of(prompt([2, 0]), prompt([1, 3, 0]))
    assert cached_first(4, cache) == ([1, 3, 0, 2], len(prompt([1, 3, 0])))


def test_a_document_cached_in_part_counts_but_ends_the_path():
    cache = cache_of(prompt([2])[:-1])
    assert cached_first(4, cache) == ([2, 0, 1, 3], len(prompt([2])) - 1)


def test_no_documents():
    assert cached_first(0, cache_of(PREFIX)) == ([], 0)


@pytest.mark.parametrize("page_size", [1, 4])
@given(paths=st.lists(st.permutations(range(4)), max_size=4), cut=st.integers(0, 40))
def test_no_order_has_more_cached(page_size, paths, cut):
    cache = cache_of(
        *(prompt(path)[: max(len(prompt(path)) - cut, 0)] for path in paths), page_size=page_size
    )
    order, tokens = cached_first(4, cache)
    assert sorted(order) == [0, 1, 2, 3]
    assert tokens == cache(order).tokens == max(cache(p).tokens for p in permutations(range(4)))
