"""Shared ranges against a comparison of every slot, over rows laid out as a tree does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rag_radix_kernels.grouping import SharedRange, find_shared_ranges
from shared_rows import Path, table_of


def ranges_of(paths: Sequence[Path], min_saved_keys: int = 1, **options: int) -> list[SharedRange]:
    return find_shared_ranges(*table_of(paths, **options), min_saved_keys=min_saved_keys)


def question(i: int, tokens: int = 30) -> tuple[str, int]:
    return f"question {i}", tokens


def test_requests_on_one_path_share_all_of_it_but_their_questions() -> None:
    paths = [(("system", 100), ("doc", 903), question(i, 30 + i)) for i in range(5)]
    assert ranges_of(paths) == [SharedRange((0, 1, 2, 3, 4), 0, 1003)]


def test_levels_narrow_from_what_all_share_to_what_few_share() -> None:
    system, a, b, c = ("system", 200), ("a", 500), ("b", 333), ("c", 400)
    paths = [
        (system, a, b, question(0)),
        (system, c, question(1)),
        (system, a, b, question(2)),
        (system, a, c, question(3)),
        (("other", 700), question(4)),
    ]
    assert ranges_of(paths) == [
        SharedRange((0, 1, 2, 3), 0, 200),
        SharedRange((0, 2, 3), 200, 700),
        SharedRange((0, 2), 700, 1033),
    ]


def test_a_level_that_saves_too_little_joins_the_next_one() -> None:
    paths = [(("system", 80), (f"doc {i % 2}", 2000), question(i)) for i in range(4)]
    assert ranges_of(paths, 1000) == [
        SharedRange((0, 2), 0, 2080),
        SharedRange((1, 3), 0, 2080),
    ]
    assert ranges_of(paths, 200)[0] == SharedRange((0, 1, 2, 3), 0, 80)


@pytest.mark.parametrize(
    "paths",
    [
        [(("doc", 5000),)],
        [((f"doc {i}", 900),) for i in range(9)],
        [(("doc", 40), question(i)) for i in range(9)],
        [(question(i, 1),) for i in range(3)],
    ],
    ids=["alone", "nothing shared", "less than a block", "one token"],
)
def test_nothing_is_grouped_where_nothing_is_saved(paths: list[Path]) -> None:
    assert ranges_of(paths) == []


def test_a_batch_of_nobody_has_no_ranges() -> None:
    table = torch.zeros((1, 8), dtype=torch.int32)
    assert find_shared_ranges(table, torch.empty(0, dtype=torch.int64), []) == []


def test_requests_that_are_equal_share_what_may_be_shared() -> None:
    table, rows, lengths = table_of([(("doc", 800),)] * 3)
    ranges = find_shared_ranges(table, rows, [n - 1 for n in lengths], min_saved_keys=1)
    assert ranges == [SharedRange((0, 1, 2), 0, 799)]


def test_slots_of_an_earlier_request_beyond_a_rows_length_are_not_read() -> None:
    table, rows, _ = table_of([(("doc", 800),)] * 3)
    ranges = find_shared_ranges(table, rows, [800, 100, 0], min_saved_keys=1)
    assert ranges == [SharedRange((0, 1), 0, 100)]


def test_a_long_context_is_compared_in_longer_blocks_and_still_to_the_slot() -> None:
    paths = [(("doc", 40001), question(i)) for i in range(2)]
    assert ranges_of(paths) == [SharedRange((0, 1), 0, 40001)]


nodes = st.tuples(st.sampled_from("abc"), st.sampled_from([1, 63, 64, 65, 130, 700]))


@settings(max_examples=60, deadline=None)
@given(
    paths=st.lists(st.lists(nodes, max_size=4).map(tuple), min_size=1, max_size=12),
    page_size=st.sampled_from([1, 16]),
    min_saved_keys=st.sampled_from([1, 300]),
)
def test_ranges_are_shared_nested_worth_it_and_complete(
    paths: list[Path], page_size: int, min_saved_keys: int
) -> None:
    # A path ends with what only its request has; within pages, nodes begin on one.
    paths = [
        (*((n, -(-t // page_size) * page_size) for n, t in path), question(i))
        for i, path in enumerate(paths)
    ]
    table, places, lengths = table_of(paths, page_size=page_size)
    rows = [table[place, :n].tolist() for place, n in zip(places, lengths, strict=True)]
    ranges = find_shared_ranges(table, places, lengths, min_saved_keys=min_saved_keys)
    ends = [0] * len(rows)
    for shared in ranges:
        assert list(shared.requests) == sorted(set(shared.requests))
        assert (len(shared.requests) - 1) * (shared.end - shared.start) >= min_saved_keys
        read = {tuple(rows[i][shared.start : shared.end]) for i in shared.requests}
        assert len(read) == 1
        for i in shared.requests:
            assert ends[i] == shared.start
            ends[i] = shared.end
    if min_saved_keys == 1:
        for i, row in enumerate(rows):
            common = (
                next(p for p, (a, b) in enumerate(zip(row, other, strict=False)) if a != b)
                for j, other in enumerate(rows)
                if i != j
            )
            assert ends[i] > max(common, default=0) - 64


def test_two_rows_with_one_slot_in_common_have_all_before_it_in_common() -> None:
    """The property that the search rests on, in the layout that these tests use."""
    paths = [(("system", 30), (f"doc {i % 3}", 70), question(i)) for i in range(6)]
    for page_size in (1, 16):
        table, places, lengths = table_of(paths, page_size=page_size)
        rows = [table[place, :n] for place, n in zip(places, lengths, strict=True)]
        for a in rows:
            for b in rows:
                equal = a[: len(b)] == b[: len(a)]
                assert equal.tolist() == sorted(equal.tolist(), reverse=True)
