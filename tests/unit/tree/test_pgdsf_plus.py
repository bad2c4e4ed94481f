"""What the tree does for a policy that weighs copies, gives them up and remembers paths."""

from __future__ import annotations

from itertools import islice

import pytest
from tree_harness import harness
from unit.tree.prompts import document, prompt
from unit.tree.test_swap_out import alone, evict

from rag_radix.history import Kind
from rag_radix.policies import POLICIES


def plus(**sizes):
    return harness(policy="pgdsf-plus", **sizes)


def test_a_document_is_not_copied_over_one_that_is_worth_more():
    with plus(device_tokens=400, host_tokens=40) as h:
        for _ in range(4):
            alone(h, "hot")
        evict(h, 1000)
        assert h.on_host("hot")
        copied = h.tree.tree_core.swapped_out_tokens
        alone(h, "cold")
        evict(h, 1000)
        assert h.on_host("hot")
        assert "cold" not in h.ends()
        assert h.tree.tree_core.swapped_out_tokens == copied
        assert (h.tree.counters.refused_nodes, h.tree.counters.refused_tokens) == (1, 40)
        for _ in range(9):
            alone(h, "hotter")
        evict(h, 1000)
        assert h.on_host("hotter")
        assert "hot" not in h.ends()
        h.check()


def test_what_is_not_worth_a_copy_ahead_of_eviction_counts_as_refused_once_it_leaves():
    with plus(device_tokens=400, host_tokens=40, policy_config={"swap_out": "eager"}) as h:
        for _ in range(9):
            alone(h, "hot")
        evict(h, 1000)
        assert h.on_host("hot")
        copied = h.tree.tree_core.swapped_out_tokens
        for question in range(3):
            h.serve([*document("cold"), question], [("cold", 0, 40)], output=())
        assert not h.on_host("cold")
        assert h.on_host("hot")
        assert h.tree.tree_core.swapped_out_tokens == copied
        assert h.tree.counters.refused_nodes == 0
        evict(h, 1000)
        assert "cold" not in h.ends()
        assert (h.tree.counters.refused_nodes, h.tree.counters.refused_tokens) == (1, 40)
        h.check()


def test_host_copies_that_the_device_has_as_well_make_room_first():
    with plus(device_tokens=400, host_tokens=84) as h:
        for name in "aabb":
            alone(h, name)
        evict(h, 1000)
        alone(h, "a")  # back on the device, and still on host
        assert h.on_device("a")
        assert h.on_host("a")
        for _ in range(9):
            alone(h, "hot")
        h.tree.evict_host(30)  # "b" stays: "a" can be given up for nothing
        assert not h.on_host("a")
        assert h.on_device("a")
        assert h.on_host("b")
        node = h.ends()["a"]
        assert (node.host_copies, node.host_reclaims) == (1, 1)
        h.check()
        evict(h, 1000)  # and it is copied again when it leaves the device after all
        assert h.ends()["a"].host_copies == 2 or "a" not in h.ends()
        h.check()


def test_a_policy_that_does_not_ask_keeps_copies_of_what_the_device_has():
    for name, policy in POLICIES.items():
        if policy.reclaims_duplicates:
            continue
        with harness(device_tokens=400, host_tokens=80, policy=name) as h:
            for document_name in "aabb":
                alone(h, document_name)
            evict(h, 1000)
            if not h.on_host("a"):
                continue
            alone(h, "a")
            h.tree.evict_host(1000)
            assert h.on_host("a")
            assert h.on_device("a")


def test_a_dropped_path_is_remembered_and_another_prefix_is_another_path():
    with plus(device_tokens=400) as h:
        tokens, spans = prompt("a", "b")
        for _ in range(3):
            h.serve(tokens, spans)
            evict(h, 1000)
            assert not h.nodes()
        h.serve(tokens, spans)
        assert [h.ends()[n].statistics.frequency for n in "ab"] == [1, 1]
        assert [h.ends()[n].statistics.history.uses for n in "ab"] == [4, 4]
        h.serve(*prompt("b"))
        paths = {n.statistics.history for n in h.nodes() if n.occurrences}
        assert sorted(history.uses for history in paths) == [1, 4, 4]
        assert len(h.tree.histories) == 3
        h.serve(tokens, spans, extra_key="tenant")
        assert len(h.tree.histories) == 5


def test_questions_outputs_and_what_prompts_begin_with_have_histories_of_their_own():
    with plus(device_tokens=1000) as h:
        h.serve(*prompt("a"))
        h.serve(*prompt("b"))
        ends = h.ends()
        system = ends["a"].parent
        assert (system.statistics.history.group, system.statistics.history.uses) == (
            Kind.PREFIX,
            2,
        )
        (question,) = ends["a"].children.values()
        (output,) = question.children.values()
        for tail in (question, output):
            assert tail.statistics.history.group == Kind.TAIL
            assert tail.statistics.mean_cost_per_token_s > 0
        assert output.statistics.history is not question.statistics.history


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_what_waiting_requests_will_use_stays(is_waited_for):
    with plus(device_tokens=400) as h:
        for step in range(40):  # until it knows that one use means little
            alone(h, f"w{step}")
        evict(h, 1000)
        for question, name in enumerate(("first", "x", "y", "x", "y")):
            ask = document(f"question {question}")
            h.serve([*document(name), *ask], [(name, 0, 40)], output=())
        waiting = [h.request([*document("first"), 5], [("first", 0, 40)])]
        h.tree.waiting = lambda: waiting if is_waited_for else []
        evict(h, 5 * 40 + 10)  # the questions and a document
        assert h.on_device("first") == is_waited_for
        assert h.on_device("x") != is_waited_for or h.on_device("y") != is_waited_for
        h.tree.waiting = tuple
        evict(h, 1000)
        assert not h.nodes()


def test_of_a_long_queue_the_first_128_requests_are_looked_at():
    with plus(device_tokens=400) as h:
        alone(h, "a")
        request = h.request([*document("a"), 5], [("a", 0, 40)])
        seen = []

        def endless():
            while True:
                seen.append(1)
                yield request

        h.tree.waiting = endless
        evict(h, 1)
        assert len(list(islice(seen, 1000))) == 128


def test_two_trees_fed_alike_decide_alike():
    config = {"swap_out": "eager", "max_depth": 2}
    for policy in sorted(POLICIES):
        states = []
        for _ in range(2):
            with harness(
                device_tokens=200, host_tokens=150, policy=policy, policy_config=config
            ) as h:
                for step in range(40):
                    names = [f"d{step * step % 7}", f"d{step % 5}", f"d{step % 3}"]
                    h.serve(*prompt(*dict.fromkeys(names), question=step % 4))
                first = min(node.id for node in h.nodes())
                states.append(
                    [
                        (node.id - first, node.ranks, node.backuped, node.evicted)
                        for node in sorted(h.nodes(), key=lambda node: node.id)
                    ]
                )
        assert states[0] == states[1], policy
