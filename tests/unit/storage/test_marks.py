"""What is known of nodes that are stored and aren't in the tree is found by their names."""

from __future__ import annotations

from types import SimpleNamespace

from unit.storage.pages import doc

from rag_radix.control.selector import Selector
from rag_radix.node import Occurrence
from rag_radix.statistics import DocumentKey, NodeStatistics
from rag_radix.storage.marks import Marks


def node(name):
    return SimpleNamespace(
        hash_value=["page"],
        key=SimpleNamespace(extra_key=None, cache_salt=None),
        names_forgotten=False,
        occurrences=(Occurrence(DocumentKey(name), 2),),
        ranks=[],
        statistics=NodeStatistics(frequency=3),
        unmarked_documents=(),
    )


def absent(marks, name):
    return [mark.key for mark in marks.absent(Selector(id=name))]


def test_a_node_is_absent_under_its_names_while_it_is_not_in_the_tree():
    marks = Marks()
    marks.also_named("page", [doc("alias")])
    assert absent(marks, "alias") == ["page"]
    mark = marks.attach(node("a"), "page")
    assert absent(marks, "alias") == []
    mark.left()
    assert absent(marks, "alias") == absent(marks, "a") == ["page"]
    marks.remove("page")
    assert absent(marks, "alias") == absent(marks, "a") == []


def test_nodes_that_come_and_go_take_no_memory_for_ever():
    marks = Marks(capacity=10)
    for number in range(100):
        name = f"document {number}"
        marks.also_named(f"page {number}", [doc(name)])
        mark = marks.attach(node(name), f"page {number}")
        if number % 2:
            mark.left()
    assert len(marks) == 10
    assert len(marks._named) == 5
