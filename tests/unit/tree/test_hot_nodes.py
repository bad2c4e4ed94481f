"""What many prompts begin with has a host copy before it leaves the device, and keeps it."""

from __future__ import annotations

import pytest
import torch
from tree_harness import harness
from unit.tree.prompts import SYSTEM, prompt

from rag_radix.swap_out import _HOT_PARTS, _HOT_USES


def hot(**options):
    flags = {"device_tokens": 2000, "host_tokens": 2000, "policy_config": {"swap_out": "hot"}}
    return harness(**{**flags, **options})


def system_of(h):
    return next(node for node in h.nodes() if list(node.key.token_ids) == SYSTEM)


@pytest.mark.parametrize("policy", ["pgdsf", "pgdsf-plus", "lru"])
def test_a_system_prompt_is_copied_when_it_is_hot_and_the_documents_below_it_are_not(policy):
    with hot(policy=policy) as h:
        for index in range(_HOT_USES + 2):
            h.serve(*prompt(f"d{index}", question=index))
            assert system_of(h).backuped == (index + 1 >= _HOT_USES)
        assert [node.backuped for node in h.nodes()].count(True) == 1
        h.check()


def test_a_hot_document_is_copied_too_and_a_rare_one_is_not():
    with hot(device_tokens=4000) as h:
        for index in range(_HOT_USES + 1):
            h.serve(*prompt("hot", question=index))
        assert h.on_host("hot")
        h.serve(*prompt("old", question=0))
        for index in range(_HOT_PARTS * (_HOT_USES + 2)):
            h.serve(*prompt("hot", question=index % 5))
        for index in range(_HOT_USES + 1):
            h.serve(*prompt("old", question=index))
        assert not h.on_host("old")


def test_an_unannotated_prompt_that_many_begin_with_is_copied():
    with hot() as h:
        for index in range(_HOT_USES):
            h.serve([*SYSTEM, 1_000 + index, 7])
        assert system_of(h).backuped


def test_the_copy_stays_where_others_are_given_up_for_room():
    with hot(policy="pgdsf-plus", policy_config={"swap_out": "eager"}) as h:
        for index in range(_HOT_USES):
            h.serve(*prompt(f"d{index}", question=index))
        assert sum(node.backuped for node in h.nodes()) == 1 + _HOT_USES
        h.tree.cache_controller.mem_pool_host.free(
            torch.cat(h.tree.component.evict_from_host(2000))
        )
        assert [node for node in h.nodes() if node.backuped] == [system_of(h)]
        h.check()


def test_without_a_host_tier_nothing_is_copied():
    with hot(host_tokens=0) as h:
        for index in range(_HOT_USES + 1):
            h.serve(*prompt(f"d{index}", question=index))
        assert not system_of(h).backuped
