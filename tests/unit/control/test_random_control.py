"""Whatever happens, in whatever order: what is found of an invalidated document is new."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch
from tree_harness import harness
from unit.tree.prompts import prompt

from rag_radix.control.pins import Pin
from rag_radix.control.selector import Selector
from rag_radix.errors import ControlError

NAMES = "abcd"
STEPS = 150


class Run:
    """Requests in all stages, and when each slot of the device was computed."""

    def __init__(self, h, seed):
        self.h, self.rng = h, random.Random(seed)
        self.now = 0
        self.computed_at = torch.zeros(h.allocator.size + h.page_size + 1, dtype=torch.int64)
        self.invalidated_at = dict.fromkeys(NAMES, 0)
        self.waiting, self.prefilling, self.decoding = [], [], []
        self.reused = 0

    def step(self):
        self.now += 1
        actions = [self.arrive, self.admit, self.admit, self.prefill, self.prefill, self.decode]
        actions += [self.finish, self.drop, self.invalidate, self.pin, self.unpin]
        self.rng.choice(actions)()
        self.h.check()

    def arrive(self):
        if len(self.waiting) < 3:
            names = self.rng.sample(NAMES, self.rng.randint(1, 3))
            tokens, spans = prompt(*names, question=self.rng.randint(0, 3))
            self.waiting.append(self.h.request(tokens, spans))

    def admit(self):
        if self.waiting and len(self.prefilling) + len(self.decoding) < 3:
            req = self.waiting.pop(0)
            self.h.admit(req)
            self.check_reused(req)
            self.prefilling.append(req)

    def check_reused(self, req):
        slots = self.h.tree.prefix_device_indices(req)
        loaded = req.host_loaded_length
        if loaded:  # computed before it went to host, at a time that isn't known here
            slots = slots[: len(slots) - loaded]
        self.reused += len(slots)
        ids = list(req.origin_input_ids)
        for name in NAMES:
            first = prompt(name)[0][20]
            if first in ids and (start := ids.index(first)) < len(slots):
                oldest = int(self.computed_at[slots[start:]].min())
                assert oldest > self.invalidated_at[name] or not self.invalidated_at[name]

    def prefill(self):
        if self.prefilling:
            req = self.rng.choice(self.prefilling)
            start = req.prefix_len
            self.h.compute(req, self.rng.choice([16, 30, None]))
            row = self.h.rows.req_to_token[req.kv.req_pool_idx]
            self.computed_at[row[start : req.extend_end].long()] = self.now
            if self.rng.random() < 0.2:
                self.invalidate()  # while the pass runs
            self.h.publish(req)
            if req.extend_end == len(req.origin_input_ids):
                self.prefilling.remove(req)
                self.decoding.append(req)

    def decode(self):
        if self.decoding:
            req = self.rng.choice(self.decoding)
            before = req.kv.kv_committed_len
            self.h.decode(req, 9_000_000 + self.now)
            row = self.h.rows.req_to_token[req.kv.req_pool_idx]
            self.computed_at[row[before : req.kv.kv_committed_len].long()] = self.now

    def finish(self):
        done = [req for req in self.decoding if req.output_ids]
        if done:
            req = self.rng.choice(done)
            self.decoding.remove(req)
            self.h.finish(req, aborted=self.rng.random() < 0.2)

    def drop(self):
        started = [req for req in self.prefilling if req.kv.kv_allocated_len]
        running = started + self.decoding
        if running and self.rng.random() < 0.3:
            req = self.rng.choice(running)
            (self.prefilling if req in self.prefilling else self.decoding).remove(req)
            self.h.drop(req)

    def invalidate(self):
        if self.rng.random() < 0.05:
            self.h.tree.control.invalidate(Selector(prefix=""))
            self.invalidated_at = dict.fromkeys(NAMES, self.now)
        else:
            name = self.rng.choice(NAMES)
            self.h.tree.control.invalidate(Selector(id=name))
            self.invalidated_at[name] = self.now

    def pin(self):
        tier = "host" if self.h.tree.cache_controller and self.rng.random() < 0.5 else "device"
        with suppress(ControlError):  # over budget
            self.h.tree.control.pin(Pin(Selector(id=self.rng.choice(NAMES)), tier))

    def unpin(self):
        self.h.tree.control.unpin(Selector(id=self.rng.choice(NAMES)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("page_size", "host_tokens", "swap_out", "policy"),
    [
        (1, 0, "on_evict", "pgdsf"),
        (1, 400, "on_evict", "pgdsf-plus"),
        (8, 400, "eager", "pgdsf"),
    ],
)
def test_nothing_stale_is_ever_found(seed, page_size, host_tokens, swap_out, policy):
    with harness(
        device_tokens=640,
        host_tokens=host_tokens,
        page_size=page_size,
        policy=policy,
        policy_config={"swap_out": swap_out},
    ) as h:
        run = Run(h, seed)
        for _ in range(STEPS):
            run.step()
        while run.prefilling or run.decoding:
            run.prefill()
            run.decode()
            run.finish()
        assert run.reused > 0
        for name in NAMES:
            h.tree.control.unpin(Selector(id=name))
        h.poll()
        h.check()
        assert h.tree.control.report()["retired_nodes"] == 0
        assert h.tree.protected_size() == 0
