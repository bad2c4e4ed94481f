from __future__ import annotations

from rag_radix.statistics import DocumentFrequencies, DocumentKey


def test_document_frequencies_forget_the_least_recently_retrieved_first():
    counts = DocumentFrequencies(capacity=2)
    a, b, c = (DocumentKey(name) for name in "abc")
    assert [counts.record(key) for key in (a, b, a, c)] == [1, 1, 2, 1]
    assert len(counts) == 2
    assert counts.record(a) == 3
    assert counts.record(b) == 1
