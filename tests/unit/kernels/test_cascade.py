"""Levels against the float64 reference, with whatever computes a level."""

from __future__ import annotations

import torch
from rag_radix_kernels import reference
from rag_radix_kernels.cascade import Level, State, plan_levels, run_levels
from rag_radix_kernels.grouping import SharedRange, find_shared_ranges
from rag_radix_kernels.prefix_attention import causal_attention, merge
from shared_rows import Path, table_of

SYSTEM, DOC, NEXT = ("system", 70), ("doc", 300), ("next", 130)
PATHS: list[Path] = [
    (SYSTEM, DOC, NEXT, ("own", 20)),
    (SYSTEM, ("other", 200), ("alone", 9)),
    (("single", 90),),
    (SYSTEM, DOC, ("mine", 1)),
    (SYSTEM, DOC, NEXT, ("its", 55)),
]


class Setup:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.table, self.rows, self.lengths = table_of(PATHS)
        slots = int(self.table.max()) + 1
        self.keys, self.values = (torch.randn(slots, 2, 16) for _ in range(2))

    def levels(self, new_lens: list[int], *, are_cached: bool) -> list[Level]:
        lengths = self.lengths
        if are_cached:
            lengths = [n - new for n, new in zip(lengths, new_lens, strict=True)]
        shareable = lengths if are_cached else [n - 1 for n in lengths]
        ranges = find_shared_ranges(self.table, self.rows, shareable, min_saved_keys=1)
        assert len({r.start for r in ranges}) == 3
        return plan_levels(self.table, self.rows, ranges, lengths, new_lens)

    def attend(self, level: Level, query: torch.Tensor) -> State:
        parts = []
        queries, keys = level.query_starts.tolist(), level.key_starts.tolist()
        for run in range(len(queries) - 1):
            slots = level.slots[keys[run] : keys[run + 1]].long()
            part = query[queries[run] : queries[run + 1]]
            parts.append(reference.attention(part, self.keys[slots], self.values[slots], scale=0.3))
        outputs, lses = zip(*parts, strict=True)
        return torch.cat(outputs).float(), torch.cat(lses).float()

    def assert_right(self, actual: torch.Tensor, query: torch.Tensor, new_lens: list[int]) -> None:
        outputs, queries = actual.split(new_lens), query.split(new_lens)
        for row, length, output, own in zip(self.rows, self.lengths, outputs, queries, strict=True):
            slots = self.table[row, :length].long()
            expected, _ = reference.attention(
                own,
                self.keys[slots],
                self.values[slots],
                scale=0.3,
                causal_from=length - len(own),
            )
            torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_decode_begins_with_what_each_request_reads_alone() -> None:
    setup = Setup()
    new_lens = [1] * len(PATHS)
    levels = setup.levels(new_lens, are_cached=False)
    query = torch.randn(len(PATHS), 4, 16)
    assert levels[0].rows.tolist() == list(range(len(PATHS)))
    output = run_levels(query, levels, lambda i, q: setup.attend(levels[i], q), merge)
    setup.assert_right(output, query, new_lens)


def test_extend_adds_the_levels_to_what_the_new_tokens_give_each_other() -> None:
    setup = Setup()
    new_lens = [20, 3, 90, 1, 7]
    levels = setup.levels(new_lens, are_cached=True)
    query = torch.randn(sum(new_lens), 4, 16)
    states = []
    for row, length, own in zip(setup.rows, setup.lengths, query.split(new_lens), strict=True):
        slots = setup.table[row, length - len(own) : length].long()
        states.append(causal_attention(own, setup.keys[slots], setup.values[slots], scale=0.3))
    outputs, lses = zip(*states, strict=True)
    output = run_levels(
        query,
        levels,
        lambda i, q: setup.attend(levels[i], q),
        merge,
        (torch.cat(outputs), torch.cat(lses)),
    )
    setup.assert_right(output, query, new_lens)


def test_every_slot_of_a_range_is_read_once() -> None:
    setup = Setup()
    levels = setup.levels([1] * len(PATHS), are_cached=False)
    read = torch.cat([level.slots for level in levels]).tolist()
    used = {
        slot
        for row, n in zip(setup.rows, setup.lengths, strict=True)
        for slot in setup.table[row, :n].tolist()
    }
    assert sorted(read) == sorted(used)


def test_a_request_that_reads_nothing_alone_is_on_no_level_of_its_own() -> None:
    table, rows, lengths = table_of([(DOC,), (DOC,), (DOC, ("own", 8))])
    ranges = [SharedRange((0, 1, 2), 0, 300)]
    alone, shared = plan_levels(table, rows, ranges, lengths, [2, 1, 3])
    assert alone.rows.tolist() == [3, 4, 5]
    assert alone.key_starts.tolist() == [0, 8]
    assert shared.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert shared.query_starts.tolist() == [0, 6]
    assert shared.key_starts.tolist() == [0, 300]
