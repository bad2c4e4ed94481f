from __future__ import annotations

from rag_radix.statistics import DocumentFrequencies, DocumentKey


def test_document_frequencies_forget_the_least_recently_retrieved_first():
    counts = DocumentFrequencies(capacity=2)
    a, b, c = (DocumentKey(name) for name in "abc")
    assert [counts.record(key) for key in (a, b, a, c)] == [1, 1, 2, 1]
    assert len(counts) == 2
    assert counts.record(a) == 3
    assert counts.record(b) == 1


def test_counts_of_an_earlier_server_are_known_until_newer_ones_take_their_room():
    counts = DocumentFrequencies(capacity=2)
    counts.restore({("a", "", ""): 4, ("b", "", ""): 5})
    assert len(counts) == 2
    assert counts.record(DocumentKey("c")) == 1
    assert dict(counts.counts()()) == {("b", "", ""): 5, ("c", "", ""): 1}
    assert counts.record(DocumentKey("a")) == 5
    assert dict(counts.counts()()) == {("c", "", ""): 1, ("a", "", ""): 5}
