from __future__ import annotations

import threading
from typing import Any

import faiss
import numpy as np
import pytest
from rag_radix_frontend.encoders import Vectors
from rag_radix_frontend.errors import ArgumentError
from rag_radix_frontend.index import open_search
from rag_radix_frontend.pace import MAX_DOUBLINGS, MIN_FIRST_STAGE_S, Pace, doubling
from rag_radix_frontend.staged_ivf import StagedIVF
from rag_radix_frontend.staged_search import FaissSearch, one_thread
from search_oracle import assert_equals_faiss, make_index, unit_vectors

VECTORS = unit_vectors(4000, 32, seed=0)
QUERIES = unit_vectors(4020, 32, seed=0)[4000:]
STORAGES = ["Flat", "SQ8", "SQfp16", "SQ4", "PQ4np", "PQ8x4"]


@pytest.fixture(scope="module")
def flat() -> Any:
    return make_index("IVF64,Flat", "inner product", VECTORS)


def parameters(nprobe: int) -> Any:
    return faiss.SearchParametersIVF(nprobe=nprobe)


@pytest.mark.parametrize("metric", ["inner product", "L2"])
@pytest.mark.parametrize("storage", STORAGES)
def test_the_final_stage_is_what_faiss_finds_with_the_same_nprobe(
    storage: str, metric: str
) -> None:
    index = make_index(f"IVF64,{storage}", metric, VECTORS)
    for nprobe in (1, 2, 7, 64):
        for stages in (1, 3, 64, (0.01, 0.5, 1.0)):
            search = StagedIVF(index, nprobe=nprobe, stages=stages)
            for k in (1, 10):
                for query in QUERIES[:5]:
                    assert_equals_faiss(
                        search.search(query, k), index, query, k, parameters(nprobe)
                    )


@pytest.mark.parametrize("by_residual", [False, True])
@pytest.mark.parametrize("storage", ["SQ8", "PQ4np"])
def test_codes_of_residuals_and_codes_of_vectors_are_both_searched(
    storage: str, by_residual: bool
) -> None:
    def choose(index: Any) -> None:
        index.by_residual = by_residual

    index = make_index(f"IVF64,{storage}", "inner product", VECTORS, choose)
    search = StagedIVF(index, nprobe=20, stages=5)
    for query in QUERIES:
        assert_equals_faiss(search.search(query, 10), index, query, 10, parameters(20))


def test_other_ways_to_find_the_clusters_are_faiss_s_own() -> None:
    index = make_index("IVF64_HNSW8,Flat", "inner product", VECTORS)
    for query in QUERIES:
        search = StagedIVF(index, nprobe=10, stages=4)
        assert_equals_faiss(search.search(query, 10), index, query, 10, parameters(10))


def test_equal_vectors_may_come_in_any_order_but_only_once() -> None:
    vectors = np.repeat(VECTORS[:200], 10, axis=0)
    index = make_index("IVF16,Flat", "inner product", vectors)
    for query in QUERIES:
        search = StagedIVF(index, nprobe=8, stages=8)
        assert_equals_faiss(search.search(query, 15), index, query, 15, parameters(8))


@pytest.mark.parametrize("nprobe", [1, 64, 1000])
def test_fewer_vectors_than_k_are_found_without_fillers(flat: Any, nprobe: int) -> None:
    for stages in (1, 5):
        search = StagedIVF(flat, nprobe=nprobe, stages=stages)
        last = assert_equals_faiss(
            search.search(QUERIES[0], 5000), flat, QUERIES[0], 5000, parameters(min(nprobe, 64))
        )[-1]
        assert len(last.positions) == 4000 if nprobe >= 64 else len(last.positions) < 4000


def test_empty_clusters_give_stages_of_what_is_known_so_far() -> None:
    index = make_index("IVF64,Flat", "inner product", VECTORS)
    index.remove_ids(np.arange(100, 4000))
    for query in QUERIES:
        search = StagedIVF(index, nprobe=64, stages=64)
        assert_equals_faiss(search.search(query, 200), index, query, 200, parameters(64))


def test_a_stage_visits_the_clusters_up_to_its_end_and_none_twice(flat: Any) -> None:
    lists = flat.invlists
    for query in QUERIES:
        order = flat.quantizer.search(query[None, :], 24)[1][0]
        sizes = np.cumsum([lists.list_size(int(cluster)) for cluster in order])
        ends = (2, 6, 12, 24)
        exact = [flat.search(query[None, :], 5, params=parameters(end))[1][0] for end in ends]
        faiss.cvar.indexIVF_stats.reset()
        stages = StagedIVF(flat, nprobe=24, stages=(0.1, 0.25, 0.5, 1)).search(query, 5)
        for end, expected, stage in zip(ends, exact, stages, strict=True):
            assert faiss.cvar.indexIVF_stats.nlist == end
            assert faiss.cvar.indexIVF_stats.ndis == sizes[end - 1]
            np.testing.assert_array_equal(stage.positions, expected)


def test_a_search_left_at_its_first_stage_visits_no_more(flat: Any) -> None:
    faiss.cvar.indexIVF_stats.reset()
    next(iter(StagedIVF(flat, nprobe=64, stages=8).search(QUERIES[0], 5)))
    assert faiss.cvar.indexIVF_stats.nlist == 8


def test_more_stages_than_clusters_are_as_many_as_there_are_clusters(flat: Any) -> None:
    assert len(list(StagedIVF(flat, nprobe=3, stages=50).search(QUERIES[0], 5))) == 3


@pytest.mark.parametrize(
    "recipe", ["PCA16,IVF16,Flat", "IDMap,IVF16,Flat", "Flat", "IVF16,PQ8x4fs"]
)
def test_what_cannot_be_visited_by_clusters_has_one_stage_and_its_own_nprobe(recipe: str) -> None:
    index = faiss.index_factory(32, recipe, faiss.METRIC_INNER_PRODUCT)
    with one_thread():
        index.train(VECTORS[:1000])
        if recipe.startswith("IDMap"):
            index.add_with_ids(VECTORS, np.arange(4000))
        else:
            index.add(VECTORS)
    with pytest.raises(ArgumentError, match="one stage"):
        StagedIVF(index)
    search = open_search(index, nprobe=16, ef_search=64, stages=8)
    assert isinstance(search, FaissSearch)
    (stage,) = search.search(VECTORS[0], 3)
    nprobe = None if recipe == "Flat" else parameters(16)
    expected = index.search(VECTORS[:1], 3, params=nprobe)[1][0]
    np.testing.assert_array_equal(stage.positions, expected)


@pytest.mark.parametrize("recipe", ["IVF64,Flat", "IVF64,SQ8", "HNSW16", "IVF64_HNSW16,PQ4np"])
def test_a_search_leaves_the_parameters_of_a_shared_index_alone(recipe: str) -> None:
    def parameters_of(index: Any) -> list[int]:
        parts = [index, getattr(index, "hnsw", None), getattr(index, "quantizer", None)]
        names = ("nprobe", "efSearch", "max_codes")
        return [getattr(part, name, -1) for part in parts for name in names]

    index = make_index(recipe, "inner product", VECTORS)
    before = parameters_of(index)
    stages = open_search(index, nprobe=16, ef_search=64, stages=8).search(QUERIES[0], 5)
    next(stages)
    assert parameters_of(index) == before
    list(stages)
    assert parameters_of(index) == before


def test_a_query_of_another_width_is_refused(flat: Any) -> None:
    for search in (StagedIVF(flat, stages=2), FaissSearch(flat)):
        for query in (VECTORS[0, :31], np.zeros(33, np.float32), VECTORS[:1]):
            with pytest.raises(ArgumentError, match=r"shape \(32,\)"):
                list(search.search(query, 5))


def test_arguments_that_make_no_sense_are_named(flat: Any) -> None:
    with pytest.raises(ArgumentError, match="nprobe must be at least 1, not 0"):
        StagedIVF(flat, nprobe=0)
    with pytest.raises(ArgumentError, match="stages must be at least 1, not 0"):
        StagedIVF(flat, stages=0)
    for fractions in ((), (0.5,), (0.5, 0.5, 1), (0.0, 1), (1, 0.5), (0.5, 2)):
        with pytest.raises(ArgumentError, match="ascend to 1"):
            StagedIVF(flat, stages=fractions)


def test_the_stages_of_a_search_follow_from_the_time_it_takes() -> None:
    assert doubling(0.0) == doubling(1.9 * MIN_FIRST_STAGE_S) == (1.0,)
    assert doubling(2 * MIN_FIRST_STAGE_S) == (0.5, 1.0)
    assert doubling(9 * MIN_FIRST_STAGE_S) == (0.125, 0.25, 0.5, 1.0)
    assert doubling(3600) == tuple(2.0**-i for i in range(MAX_DOUBLINGS, -1, -1))


def test_the_time_is_measured_once_and_only_where_stages_are_not_given() -> None:
    searches: list[None] = []
    pace = Pace(None, lambda: searches.append(None))
    pace.ends(100)
    measured = len(searches)
    pace.ends(100)
    assert len(searches) == measured > 0
    assert Pace(4, pytest.fail).ends(10) == [2, 5, 8, 10]
    assert Pace((0.001, 0.01, 1), pytest.fail).ends(10) == [1, 10]


def test_threads_share_a_search_and_start_no_others(flat: Any) -> None:
    """Each of many threads would otherwise get an OpenMP pool of its own."""
    narrow = StagedIVF(flat, nprobe=2, stages=2)
    wide = StagedIVF(flat, nprobe=64, stages=8)
    exact = FaissSearch(make_index("Flat", "inner product", unit_vectors(20_000, 64, seed=1)))
    expected = {
        search: [list(search.search(query, 5))[-1].positions for query in QUERIES]
        for search in (narrow, wide)
    }
    before = _threads_of_this_process()
    everyone_is_done, may_end = threading.Barrier(33), threading.Event()
    wrong: list[Vectors] = []

    def run(number: int) -> None:
        search = (narrow, wide)[number % 2]
        list(exact.search(unit_vectors(1, 64, seed=2)[0], 5))
        for query, positions in zip(QUERIES, expected[search], strict=True):
            # Two searches of one thread at a time, the other left half way.
            next(iter(wide.search(query, 3)))
            if not np.array_equal(list(search.search(query, 5))[-1].positions, positions):
                wrong.append(query)
        everyone_is_done.wait()
        may_end.wait()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    everyone_is_done.wait()
    started = _threads_of_this_process() - before
    may_end.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert started <= 32


def _threads_of_this_process() -> int:
    import psutil

    return int(psutil.Process().num_threads())
