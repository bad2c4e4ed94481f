from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import faiss
import numpy as np
import pytest
from rag_radix_frontend import hnsw_walk
from rag_radix_frontend.encoders import Vectors
from rag_radix_frontend.errors import ArgumentError
from rag_radix_frontend.index import open_search
from rag_radix_frontend.staged_hnsw import StagedHNSW
from rag_radix_frontend.staged_search import FaissSearch, one_thread
from search_oracle import METRICS, assert_equals_faiss, make_index, unit_vectors

VECTORS = unit_vectors(3000, 32, seed=0)
QUERIES = unit_vectors(3020, 32, seed=0)[3000:]


@pytest.fixture(scope="module")
def flat() -> Any:
    return make_index("HNSW16,Flat", "inner product", VECTORS)


def make_pq(metric: str) -> Any:
    """The factory makes only L2 ones."""
    index = faiss.IndexHNSWPQ(32, 8, 16, 8, METRICS[metric])
    faiss.downcast_index(index.storage).do_polysemous_training = False  # takes seconds
    index.train(VECTORS[:1000])
    index.add(VECTORS)
    return index


STORAGES: dict[str, Callable[[str], Any]] = {
    "PQ": make_pq,
    "uniform SQ8": lambda metric: _scalar(faiss.ScalarQuantizer.QT_8bit_uniform, metric),
    **{
        storage: lambda metric, storage=storage: make_index(f"HNSW16,{storage}", metric, VECTORS)
        for storage in ("Flat", "SQ8", "SQfp16")
    },
}


def _scalar(kind: int, metric: str) -> Any:
    index = faiss.IndexHNSWSQ(32, kind, 16, METRICS[metric])
    index.train(VECTORS)
    index.add(VECTORS)
    return index


def parameters(ef_search: int, k: int) -> Any:
    return faiss.SearchParametersHNSW(efSearch=max(ef_search, k))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_final_stage_is_what_faiss_finds_with_the_same_effort(
    storage: str, metric: str
) -> None:
    index = STORAGES[storage](metric)
    assert index.metric_type == METRICS[metric]
    for ef_search in (1, 5, 40, 300):
        for stages in (1, 4, 50, (0.01, 0.5, 1.0)):
            search = StagedHNSW(index, ef_search=ef_search, stages=stages)
            for k in (1, 10):
                for query in QUERIES[:8]:
                    assert_equals_faiss(
                        search.search(query, k), index, query, k, parameters(ef_search, k)
                    )
    assert len(hnsw_walk.advance.signatures) == 1  # no search waits for another compilation


def test_widths_that_registers_do_not_divide_are_measured_to_the_end() -> None:
    vectors = unit_vectors(1000, 37, seed=3)
    index = make_index("HNSW8,Flat", "L2", vectors)
    for query in vectors[:20]:
        search = StagedHNSW(index, stages=3)
        assert_equals_faiss(search.search(query, 10), index, query, 10, parameters(64, 10))


def test_equal_vectors_are_found_once_each() -> None:
    vectors = np.repeat(VECTORS[:300], 5, axis=0)
    index = make_index("HNSW16,Flat", "inner product", vectors)
    for query in QUERIES:
        stages = list(StagedHNSW(index, ef_search=200, stages=5).search(query, 12))
        exact = np.sort(vectors @ query)[::-1][:12]
        assert len(set(stages[-1].positions.tolist())) == 12
        np.testing.assert_allclose(stages[-1].scores, exact, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_fewer_vectors_than_k_are_found_without_fillers(count: int) -> None:
    index = make_index("HNSW8,Flat", "inner product", VECTORS[:count])
    for stages in (1, 3):
        search = StagedHNSW(index, stages=stages)
        last = assert_equals_faiss(
            search.search(QUERIES[0], 100), index, QUERIES[0], 100, parameters(64, 100)
        )[-1]
        assert len(last.positions) == count


def test_what_no_link_leads_to_is_not_found_as_in_faiss() -> None:
    index = make_index("HNSW8,Flat", "inner product", VECTORS[:200])
    links = faiss.rev_swig_ptr(index.hnsw.neighbors.data(), index.hnsw.neighbors.size())
    starts = faiss.vector_to_array(index.hnsw.offsets)
    lonely = [node for node in (3, 50, 199) if node != index.hnsw.entry_point]
    for node in range(200):
        own = links[starts[node] : starts[node + 1]]
        own[np.isin(own, lonely)] = node
    search = StagedHNSW(index, ef_search=200, stages=4)
    for query in QUERIES:
        last = assert_equals_faiss(
            search.search(query, 200), index, query, 200, parameters(200, 200)
        )[-1]
        assert set(range(200)) - set(last.positions.tolist()) == set(lonely)


def seen_nodes(search: StagedHNSW) -> int:
    """Nodes that the last finished or abandoned search of an object has measured."""
    visited, mark = search._idle_visited[-1]
    return int(np.count_nonzero(visited == mark))


def test_a_search_is_resumed_not_restarted(flat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    descents, stops = [], []
    begin, advance = hnsw_walk.begin, hnsw_walk.advance
    monkeypatch.setattr(hnsw_walk, "begin", lambda *a: (descents.append(None), begin(*a)))
    monkeypatch.setattr(hnsw_walk, "advance", lambda *a: (stops.append(a[4]), advance(*a))[1])
    for query in QUERIES:
        whole, staged = StagedHNSW(flat, stages=1), StagedHNSW(flat, stages=8)
        list(whole.search(query, 5))
        descents.clear()
        stops.clear()
        list(staged.search(query, 5))
        assert len(descents) == 1
        assert stops[:7] == [8] * 7
        assert seen_nodes(staged) == seen_nodes(whole)


def test_stages_go_ever_further_and_the_first_is_early(flat: Any) -> None:
    for query in QUERIES:
        seen = []
        for wanted in range(1, 9):
            search = StagedHNSW(flat, stages=8)
            stages = search.search(query, 5)
            for _ in range(wanted):
                stage = next(stages)
            stages.close()  # type: ignore[attr-defined]
            seen.append(seen_nodes(search))
            assert not stage.final or wanted == 8
        assert seen == sorted(seen)
        assert seen[0] < seen[-1] / 2


def test_provisional_scores_only_get_better(flat: Any) -> None:
    for query in QUERIES:
        scores = [c.scores for c in StagedHNSW(flat, stages=(0.2, 0.4, 1)).search(query, 5)]
        for before, after in pairwise(scores):
            assert (after[: len(before)] >= before).all()


def test_marks_of_earlier_searches_are_never_taken_for_ones_own(flat: Any) -> None:
    search = StagedHNSW(flat, ef_search=20, stages=2)
    for number in range(600):
        query = QUERIES[number % len(QUERIES)]
        assert_equals_faiss(search.search(query, 5), flat, query, 5, parameters(20, 5))
    assert len(search._idle_visited) == 1


@pytest.mark.parametrize("recipe", ["HNSW16,SQ4", "IDMap,HNSW16,Flat", "PCA16,HNSW16,Flat"])
def test_what_cannot_be_walked_has_one_stage_and_its_own_effort(recipe: str) -> None:
    index = faiss.index_factory(32, recipe, faiss.METRIC_INNER_PRODUCT)
    with one_thread():
        index.train(VECTORS[:1000])
        if recipe.startswith("IDMap"):
            index.add_with_ids(VECTORS, np.arange(len(VECTORS)))
        else:
            index.add(VECTORS)
    with pytest.raises(ArgumentError, match="one stage"):
        StagedHNSW(index)
    search = open_search(index, nprobe=16, ef_search=200, stages=8)
    assert isinstance(search, FaissSearch)
    (stage,) = search.search(QUERIES[0], 5)
    expected = index.search(QUERIES[:1], 5, params=parameters(200, 5))[1][0]
    np.testing.assert_array_equal(stage.positions, expected)


def test_other_metrics_are_left_to_faiss() -> None:
    index = faiss.IndexHNSWFlat(32, 16, faiss.METRIC_L1)
    index.add(VECTORS)
    assert isinstance(open_search(index, nprobe=1, ef_search=64, stages=2), FaissSearch)


def test_an_empty_index_finds_nothing() -> None:
    empty = faiss.IndexHNSWFlat(32, 8, faiss.METRIC_INNER_PRODUCT)
    (stage,) = open_search(empty, nprobe=1, ef_search=8, stages=4).search(QUERIES[0], 5)
    assert len(stage.positions) == 0


def test_a_query_of_another_width_is_refused(flat: Any) -> None:
    for search in (StagedHNSW(flat, stages=2), FaissSearch(flat)):
        for query in (VECTORS[0, :31], np.zeros(33, np.float32), VECTORS[:1]):
            with pytest.raises(ArgumentError, match=r"shape \(32,\)"):
                list(search.search(query, 5))


def test_arguments_that_make_no_sense_are_named(flat: Any) -> None:
    with pytest.raises(ArgumentError, match="ef_search must be at least 1, not 0"):
        StagedHNSW(flat, ef_search=0)
    with pytest.raises(ArgumentError, match="ascend to 1"):
        StagedHNSW(flat, stages=(0.5,))


def test_the_default_stages_end_with_what_faiss_finds(flat: Any) -> None:
    search = StagedHNSW(flat)
    search.warm_up()
    for query in QUERIES:
        assert_equals_faiss(search.search(query, 5), flat, query, 5, parameters(64, 5))


def test_threads_share_a_search_each_with_its_own_walk(flat: Any) -> None:
    narrow = StagedHNSW(flat, ef_search=8, stages=3)
    wide = StagedHNSW(flat, ef_search=300, stages=8)
    expected = {
        search: [list(search.search(query, 5))[-1].positions for query in QUERIES]
        for search in (narrow, wide)
    }
    wrong: list[Vectors] = []

    def run(number: int) -> None:
        search = (narrow, wide)[number % 2]
        for query, positions in zip(QUERIES, expected[search], strict=True):
            left_half_way = wide.search(query, 3)
            next(left_half_way)
            if not np.array_equal(list(search.search(query, 5))[-1].positions, positions):
                wrong.append(query)
            next(left_half_way)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(wide._idle_visited) <= 64
