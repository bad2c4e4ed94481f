"""What grouping rests on: rows with one slot in common have all before it in common."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from rag_radix_kernels.grouping import find_shared_ranges
from tree_harness import Harness, harness
from unit.tree.prompts import prompt


class Load:
    """Requests on few paths that come, prefill in chunks, decode and go, in any order."""

    def __init__(self, served: Harness, seed: int) -> None:
        self.served = served
        self.rng = random.Random(seed)
        self.live: list = []
        self.numbers = itertools.count()

    def step(self) -> None:
        if len(self.live) < 4 and self.rng.random() < 0.5:
            self._admit()
        elif self.live:
            self.go_on(self.rng.choice(self.live))

    def _admit(self) -> None:
        names = self.rng.choice(["ab", "abc", "ac", "b", "bd", "abd", "e", "fa"])
        # Now and then a question that was asked before, so that whole prompts are shared.
        question = next(self.numbers) if self.rng.random() < 0.7 else 0
        tokens, spans = prompt(*names, question=question, tokens=64)
        req = self.served.request(tokens, spans)
        self.served.admit(req)
        self.live.append(req)

    def go_on(self, req) -> None:
        if req.extend_end is None or req.extend_end < len(req.origin_input_ids):
            self.served.compute(req, 48)
            # Others prefill the same tokens before this is published.
            for other in self.live:
                if other is not req and self._is_in_prefill(other) and self.rng.random() < 0.3:
                    self.served.compute(other, 48)
                    self.served.publish(other)
            self.served.publish(req)
        elif len(req.output_ids) < 3:
            self.served.decode(req, 9_000_000 + len(req.output_ids))
        elif self.rng.random() < 0.2:
            self.live.remove(req)
            self.served.drop(req)
        else:
            self.live.remove(req)
            self.served.finish(req)

    @staticmethod
    def _is_in_prefill(req) -> bool:
        return req.extend_end is None or req.extend_end < len(req.origin_input_ids)

    def rows(self) -> list[torch.Tensor]:
        table = self.served.rows.req_to_token
        return [table[r.kv.req_pool_idx, : r.kv.kv_committed_len] for r in self.live]


def check(load: Load) -> int:
    rows = load.rows()
    shared_tokens = 0
    for a, b in itertools.combinations(rows, 2):
        length = min(len(a), len(b))
        equal = (a[:length] == b[:length]).tolist()
        common = equal.index(False) if False in equal else length
        assert not any(equal[common:])
        # Nor does one slot stand at two positions.
        assert len(set(a.tolist()) & set(b.tolist())) == common
        shared_tokens += common
    places = torch.tensor([req.kv.req_pool_idx for req in load.live])
    lengths = [len(row) for row in rows]
    table = load.served.rows.req_to_token
    for found in find_shared_ranges(table, places, lengths, min_saved_keys=64):
        read = {tuple(rows[i][found.start : found.end].tolist()) for i in found.requests}
        assert len(read) == 1
    return shared_tokens


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("host_tokens", [0, 4096])
def test_rows_of_a_real_tree_part_once_and_for_good(page_size: int, host_tokens: int) -> None:
    shared = 0
    with harness(device_tokens=1536, host_tokens=host_tokens, page_size=page_size) as served:
        load = Load(served, seed=page_size + host_tokens)
        for _ in range(400):
            load.step()
            shared += check(load)
        while load.live:
            load.go_on(load.live[0])
        served.check()
    assert shared > 10_000
