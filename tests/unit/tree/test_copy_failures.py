"""A copy to host that fails, here or on another rank, costs that copy and nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from tree_harness import harness
from unit.tree.prompts import DOCUMENT_TOKENS, SYSTEM, document, prompt

SYSTEM_AND_ONE = len(SYSTEM) + DOCUMENT_TOKENS


def failing(h, monkeypatch, share=1.0, seed=0):
    """From now on so many of the copies to host fail."""
    engine, rng = h.tree.cache_controller.l2_transfer_engine, random.Random(seed)
    submit = engine.submit_device_to_host

    def submit_or_not(transfers):
        if rng.random() < share:
            raise RuntimeError("out of memory")
        return submit(transfers)

    monkeypatch.setattr(engine, "submit_device_to_host", submit_or_not)


def failing_elsewhere(h, monkeypatch, share=1.0, seed=0):
    """From now on so many of the copies fail on another rank, which this one only hears of."""
    h.tree.is_alone, rng = False, random.Random(seed)

    def all_reduce(tensor, op):
        if op == torch.distributed.ReduceOp.MAX:
            tensor.copy_(torch.tensor([has or rng.random() < share for has in tensor.tolist()]))

    monkeypatch.setattr(h.tree, "_all_reduce_attn_groups", all_reduce)


def evict(h, tokens=10_000):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    h.tree.evict(EvictParams(num_tokens=tokens))
    h.check()


def check_host(h):
    """Each host slot is free or a node's."""
    pool = h.tree.cache_controller.mem_pool_host
    held = sum(len(node.key) for node in h.nodes() if node.backuped)
    assert held + h.tree.swap_out.host_slots.available_tokens == pool.logical_size


@pytest.mark.parametrize("fail", [failing, failing_elsewhere])
@pytest.mark.parametrize("policy", ["pgdsf", "pgdsf-plus"])
def test_what_could_not_be_copied_at_its_eviction_is_computed_again(monkeypatch, fail, policy):
    with harness(device_tokens=400, host_tokens=800, policy=policy) as h:
        h.serve(*prompt("a"))
        with monkeypatch.context() as broken:
            fail(h, broken)
            evict(h)
        assert not h.nodes()
        check_host(h)
        assert h.allocator.available_size() == 400
        req = h.serve(*prompt("a", question=1))
        assert req.cached_tokens_device + req.cached_tokens_host == 0
        evict(h)
        assert h.serve(*prompt("a", question=2)).cached_tokens_host == SYSTEM_AND_ONE
        assert h.tree.copy_failures.nodes > 0


@pytest.mark.parametrize("fail", [failing, failing_elsewhere])
def test_what_could_not_be_copied_ahead_stays_on_the_device_and_is_tried_again(monkeypatch, fail):
    config = {"swap_out": "eager"}
    with harness(device_tokens=400, host_tokens=800, policy_config=config) as h:
        with monkeypatch.context() as broken:
            fail(h, broken)
            h.serve(*prompt("a"))
            h.poll()
        assert not any(node.backuped for node in h.nodes())
        assert h.tree.protected_size() == 0
        check_host(h)
        assert h.serve(*prompt("a", question=1)).cached_tokens_device == SYSTEM_AND_ONE
        assert h.on_host("a")


def test_a_copy_whose_host_slots_are_locked_goes_with_its_path(monkeypatch):
    config = {"swap_out": "eager"}
    with harness(device_tokens=400, host_tokens=800, policy_config=config) as h:
        h.hold_copies()
        h.serve(*prompt("a"))
        node = h.ends()["a"]
        lock = h.tree.inc_host_lock_ref(node.id).to_dec_params()
        h.finish_copies()
        with monkeypatch.context() as broken:
            failing_elsewhere(h, broken)
            h.poll()
        assert h.serve(*prompt("a", question=1)).cached_tokens_device == len(SYSTEM)
        h.tree.dec_host_lock_ref(node.id, lock)
        h.tree.control.unlocked()
        h.check()
        check_host(h)


@pytest.mark.parametrize("policy", ["pgdsf", "pgdsf-plus", "adaptive"])
@pytest.mark.parametrize("swap_out", ["on_evict", "eager"])
@pytest.mark.parametrize("fail", [failing, failing_elsewhere])
def test_copies_that_fail_at_random_leave_every_kv_right(monkeypatch, fail, swap_out, policy):
    rng, found = random.Random(policy), 0
    with harness(
        device_tokens=300,
        host_tokens=400,
        page_size=4,
        policy=policy,
        policy_config={"swap_out": swap_out},
    ) as h:
        fail(h, monkeypatch, share=0.3)
        for question in range(60):
            names = rng.choices("abcdefgh", weights=(9, 8, 6, 5, 4, 3, 2, 1), k=rng.randint(1, 3))
            req = h.serve(*prompt(*names, question=question))
            found += req.cached_tokens_host
            h.check()
            if not h.tree.ongoing_write_through:
                check_host(h)
        assert h.tree.copy_failures.nodes > 0
        assert found > 0


def test_requests_that_run_on_a_document_whose_copy_fails_end_with_their_answer(monkeypatch):
    config = {"swap_out": "eager"}
    with harness(device_tokens=400, host_tokens=800, policy_config=config) as h:
        h.serve([*document("x"), 1], [("x", 0, DOCUMENT_TOKENS)])
        failing(h, monkeypatch)
        req = h.request(*prompt("a"))
        h.admit(req)
        h.compute(req)
        h.publish(req)
        h.poll()
        h.decode(req, 9)
        h.finish(req)
        h.check()
        assert h.serve(*prompt("a", question=1)).cached_tokens_device == SYSTEM_AND_ONE
