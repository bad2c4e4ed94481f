"""Where nodes are cut and what they are called."""

from __future__ import annotations

import pytest
from tree_harness import harness
from unit.tree.prompts import SYSTEM, document, prompt


def spans_of(h, name):
    """Start and end, in the prompt, of the chain of nodes of document `name`."""
    node = h.ends()[name]
    end = sum(len(above.key) for above in h.tree.tree_core.path_to(node.id))
    (tokens,) = [o.tokens for o in node.occurrences if o.document.id == name]
    return end - tokens, end


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [None, 32, 48])
def test_each_document_ends_at_a_node_of_its_own(page_size, chunk):
    with harness(device_tokens=400, page_size=page_size) as h:
        tokens, spans = prompt("a", "b", "c")
        h.serve(tokens, spans, chunk=chunk)
        for name, start, end in spans:
            floor = [bound // page_size * page_size for bound in (start, end)]
            assert spans_of(h, name) == tuple(floor)


def test_a_page_across_a_boundary_belongs_to_the_later_node():
    with harness(device_tokens=400, page_size=16) as h:
        tokens, spans = prompt("a", "b")  # boundaries at 20, 60, 100
        h.serve(tokens, spans)
        path = h.tree.tree_core.path_to(h.ends()["b"].id)
        assert [len(node.key) for node in path] == [16, 32, 48]


@pytest.mark.parametrize("question_tokens", [1, 7])  # the prompt ends in their page, or later
def test_a_document_smaller_than_a_page_has_no_node_and_breaks_nothing(question_tokens):
    with harness(device_tokens=400, page_size=16) as h:
        tokens, spans = prompt("a", "b", tokens=5, question_tokens=question_tokens)
        req = h.serve(tokens, spans)
        assert "b" not in h.ends() or spans_of(h, "b")[1] <= 32
        assert h.tree.counters.documents == 2
        assert req.rag_retrieval.document_counts == [1, 1]


def test_boundaries_that_are_there_are_not_cut_again():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a", "b", question=1)
        h.serve(tokens, spans)
        before = h.tree.tree_core.splits
        tokens, spans = prompt("a", "b", question=2)
        h.serve(tokens, spans)
        # The question's branch shares no token, so only new nodes were needed. SGLang itself
        # cuts the output from the prompt.
        assert h.tree.tree_core.splits - before <= 1


def test_cutting_moves_no_slot():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a", "b")
        h.serve(tokens)  # one node, no documents
        before = h.tree.all_values_flatten().sort().values
        req = h.request(tokens, spans)
        h.admit(req)
        h.compute(req)
        h.publish(req)
        own = len(tokens) - req.cached_tokens_device
        after = h.tree.all_values_flatten().sort().values
        assert set(before.tolist()) <= set(after.tolist())
        assert len(after) - len(before) <= own
        h.finish(req)
        h.check()


def test_documents_in_an_unannotated_prompt_are_named_when_a_later_request_says_so():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a", "b")
        h.serve(tokens)
        assert h.ends() == {}
        assert all(node.is_tail for node in h.nodes())
        h.serve(tokens, spans)
        assert set(h.ends()) == {"a", "b"}


def test_documents_that_begin_alike_share_a_head_and_keep_their_own_chain():
    with harness(device_tokens=1000) as h:
        heading, bodies = document("heading", 10), {n: document(n, 30) for n in "xy"}
        for name in "xy":
            ids = SYSTEM + heading + bodies[name] + [7, 8, 9]
            h.serve(ids, [(name, 20, 60)])
        x, y = (h.tree.tree_core.path_to(h.ends()[name].id) for name in "xy")
        assert x[-1] is not y[-1]
        assert x[-2] is y[-2]
        assert x[-2].key.token_ids.tolist() == heading
        assert x[-2].occurrences == ()
        assert x[-2].statistics.frequency == 2
        assert x[-1].statistics.frequency == 1
        for name in "xy":
            assert spans_of(h, name) == (20, 60)


def test_two_names_for_the_same_tokens_both_end_there():
    with harness(device_tokens=1000) as h:
        tokens, _ = prompt("a")
        h.serve(tokens, [("one", 20, 60)])
        h.serve(tokens, [("two", 20, 60)])
        assert h.ends()["one"] is h.ends()["two"]


def test_a_client_that_names_the_same_tokens_anew_each_time_does_not_fill_memory():
    with harness(device_tokens=1000) as h:
        tokens, _ = prompt("a")
        for number in range(40):
            h.serve(tokens, [(f"name-{number}", 20, 60)])
        named = [o.document.id for n in h.nodes() for o in n.occurrences]
        assert len(named) < 20
        assert named[-1] == "name-39"


@pytest.mark.parametrize(
    ("page_size", "max_depth", "before"),
    [(16, None, []), (1, 1, [("a", 0, 20)])],
    ids=["within a page", "too deep"],
)
def test_nor_does_one_whose_documents_have_no_nodes(page_size, max_depth, before):
    config = {"max_depth": max_depth}
    with harness(device_tokens=1000, page_size=page_size, policy_config=config) as h:
        for number in range(40):
            h.serve(range(64), [*before, (f"name-{number}", 20, 28)])
        noted = [document.id for node in h.nodes() for document in node.unmarked_documents]
        assert len(noted) < 30
        assert "name-39" in noted


def test_the_same_document_behind_another_one_is_another_node():
    with harness(device_tokens=1000) as h:
        for order in (("a", "b"), ("b", "a")):
            h.serve(*prompt(*order))
        places = [n for n in h.nodes() for o in n.occurrences if o.document.id == "a"]
        assert len(places) == 2


def test_namespaces_do_not_share_documents():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a")
        h.serve(tokens, spans, extra_key="tenant-1")
        req = h.serve(tokens, spans, extra_key="tenant-2")
        assert req.cached_tokens_device == 0
        keys = {o.document.extra_key for n in h.nodes() for o in n.occurrences}
        assert keys == {"tenant-1", "tenant-2"}


def test_question_and_output_are_tails():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a", "b")
        h.serve(tokens, spans)
        ends = {len(node.key): node.is_tail for node in h.nodes()}
        assert ends == {20: False, 40: False, 7: True, 2: True}


def test_text_before_a_later_document_stops_being_a_tail():
    with harness(device_tokens=1000) as h:
        tokens, spans = prompt("a")
        output = [9_000_001, 9_000_002, 9_000_003]
        h.serve(tokens, spans, output=output)
        start = len(tokens) + len(output)
        hop = tokens + output + document("b") + [1, 2, 3]
        h.serve(hop, [*spans, ("b", start, start + 40)])
        path = h.tree.tree_core.path_to(h.ends()["b"].id)
        assert not any(node.is_tail for node in path)
        assert all(node.is_tail for node in h.nodes() if node not in path)


def test_a_branch_below_a_document_starts_as_a_tail():
    with harness(device_tokens=1000) as h:
        h.serve(*prompt("a", "b"))
        h.serve(*prompt("a", question=9))
        (question,) = [n for n in h.nodes() if n.key.token_ids[0] == 500_900]
        assert question.is_tail
