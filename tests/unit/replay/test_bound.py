"""The clairvoyant bound against an exhaustive search over two tiers of whole documents."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from rag_radix.replay.bound import Bound, clairvoyant_bound
from rag_radix.replay.reference_cost import LOAD_S_PER_TOKEN, a10g_mistral_cost_table
from rag_radix.replay.trace import TraceDocument, TraceRequest
from rag_radix.replay.workloads import generate

LOAD_S = 0.2
Path = tuple[tuple[int, str], ...]


def cost(cached: int, new: int) -> float:
    return 3.0 + new + 0.05 * new * (cached + new / 2)


def random_trace(
    rng: random.Random,
    *,
    lengths: list[int],
    requests: int,
    documents_of_each: tuple[int, ...] = (1, 2, 2),
) -> list[TraceRequest]:
    # Few names where prompts are long, or no path comes twice.
    names = "abcde" if 1 in documents_of_each else "abc"
    tokens = {name: rng.choice(lengths) for name in names}
    trace = []
    for arrival in range(requests):
        end, documents = 1, []
        for name in rng.sample(names, rng.choice(documents_of_each)):
            documents.append(TraceDocument(name, "", end, end + tokens[name]))
            end += tokens[name] + 1
        trace.append(TraceRequest(float(arrival), tuple(documents), end + 2))
    return trace


def path_of(request: TraceRequest) -> list[tuple[Path, int]]:
    path: Path = ()
    steps = []
    for document in request.documents:
        path = (*path, (document.start, document.id))
        steps.append((path, document.end - document.start))
    return steps


def best_of_all_caches(
    trace: list[TraceRequest],
    device_tokens: int,
    host_tokens: int,
    gain: Callable[[TraceRequest, int, int], float],
    warm_up: int = 0,
) -> float:
    """Most total `gain(request, documents used, tokens loaded)` of all whole-document caches.

    On the device is what was there or was just used, behind its parent; on host is what
    either tier had or what was just used, behind a parent in either. Only contents that can't
    be extended are followed: more never hurts.
    """
    steps = [path_of(request) for request in trace]
    tokens = {path: length for each in steps for path, length in each}

    @cache
    def contents(
        candidates: frozenset[Path], room: int, parents: frozenset[Path]
    ) -> list[frozenset[Path]]:
        full, seen = [], {frozenset[Path]()}
        growing = list(seen)
        for chosen in growing:
            left = room - sum(tokens[path] for path in chosen)
            more = {
                chosen | {path}
                for path in candidates - chosen
                if tokens[path] <= left and (len(path) == 1 or path[:-1] in chosen | parents)
            }
            if not more:
                full.append(chosen)
            growing.extend(more - seen)
            seen |= more
        return full

    @cache
    def best(index: int, device: frozenset[Path], host: frozenset[Path]) -> float:
        if index == len(trace):
            return 0.0
        now, loaded = gain(trace[index], 0, 0), 0
        for used, (path, length) in enumerate(steps[index], 1):
            if path not in device | host:
                break
            loaded += length if path not in device else 0
            now = max(now, gain(trace[index], used, loaded))
        fresh = frozenset(path for path, _ in steps[index])
        later = max(
            best(index + 1, on_device, on_host)
            for on_device in contents(device | fresh, device_tokens, frozenset())
            for on_host in contents(device | fresh | host, host_tokens, on_device)
        )
        return later + (now if index >= warm_up else 0.0)

    return best(0, frozenset(), frozenset())


def hit_tokens(request: TraceRequest, used: int, loaded: int) -> float:
    return sum(document.end - document.start for document in request.documents[:used])


def saved_s(request: TraceRequest, used: int, loaded: int) -> float:
    # A cached document serves with the template text behind it, if another document follows.
    starts = [document.start for document in request.documents]
    prefix = [*starts, request.documents[-1].end][used]
    total = request.prompt_tokens
    return cost(starts[0], total - starts[0]) - cost(prefix, total - prefix) - LOAD_S * loaded


def bound_of(
    trace: list[TraceRequest], device_tokens: int, host_tokens: int, warm_up: int = 0
) -> Bound:
    return clairvoyant_bound(
        trace,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        cost=cost,
        load_s_per_token=LOAD_S,
        warm_up=warm_up,
    )


@pytest.mark.parametrize(("warm_up", "documents"), [(0, (1, 2, 2)), (3, (1, 2, 2)), (0, (2, 3))])
def test_no_two_tier_cache_beats_the_bound_and_it_is_close(
    warm_up: int, documents: tuple[int, ...]
) -> None:
    rng = random.Random(7)
    hits, seconds = [], []
    for _ in range(80):
        trace = random_trace(rng, lengths=[1, 2, 3, 4], requests=6, documents_of_each=documents)
        device, host = rng.randint(2, 6), rng.randint(0, 6)
        bound = bound_of(trace, device, host, warm_up)
        hits.append(
            (bound.hit_tokens, best_of_all_caches(trace, device, host, hit_tokens, warm_up))
        )
        seconds.append((bound.saved_s, best_of_all_caches(trace, device, host, saved_s, warm_up)))
    for pairs in (hits, seconds):
        assert all(bound >= optimum - 1e-9 for bound, optimum in pairs)
        above = sum(bound for bound, _ in pairs) / sum(optimum for _, optimum in pairs) - 1
        print(f"the bound is {above:.1%} above the optimum")
        assert above < 0.3


def test_the_bound_on_hits_is_the_optimum_where_nothing_fragments() -> None:
    rng = random.Random(8)
    for _ in range(80):
        trace = random_trace(rng, lengths=[1], requests=9)
        device = rng.randint(1, 4)
        optimum = best_of_all_caches(trace, device, 0, hit_tokens)
        assert bound_of(trace, device, 0).hit_tokens == optimum


def test_with_room_for_all_every_reuse_hits() -> None:
    trace = generate("mmlu-like", requests=300, seed=3, documents=300)
    bound = clairvoyant_bound(
        trace, device_tokens=10**7, host_tokens=0, cost=cost, load_s_per_token=LOAD_S
    )
    seen = set()
    reused = 0
    for request in trace:
        for path, tokens in path_of(request):
            reused += tokens if path in seen else 0
            seen.add(path)
    assert bound.hit_tokens == reused
    assert bound.saved_s == pytest.approx(bound.belady_saved_s)


def test_without_room_nothing_hits() -> None:
    trace = generate("mmlu-like", requests=300, seed=3, documents=300)
    bound = bound_of(trace, 0, 0)
    assert (bound.hit_tokens, bound.hit_rate, bound.belady_saved_s) == (0, 0.0, 0.0)
    assert bound.prefill_s == pytest.approx(bound.uncached_s, rel=1e-3)


def test_more_host_memory_never_lowers_the_bound() -> None:
    trace = generate("drift", requests=1_000, seed=4, documents=3_000)
    bounds = [bound_of(trace, 5_000, host) for host in (0, 10_000, 40_000, 160_000)]
    rates = [bound.hit_rate for bound in bounds]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_time_bound_is_close_to_what_beladys_packing_saves() -> None:
    trace = generate("mmlu-like", requests=4_000, seed=5, documents=30_000)
    bound = clairvoyant_bound(
        trace,
        device_tokens=20_000,
        host_tokens=80_000,
        cost=a10g_mistral_cost_table(),
        load_s_per_token=LOAD_S_PER_TOKEN,
        warm_up=1_000,
    )
    assert bound.belady_saved_s <= bound.saved_s <= 1.03 * bound.belady_saved_s
    assert bound.prefill_s == pytest.approx(bound.uncached_s - bound.saved_s)


def test_namespaces_versions_and_template_lengths_share_nothing() -> None:
    def request(
        arrival: int, *, start: int = 2, version: str = "", space: str = ""
    ) -> TraceRequest:
        document = TraceDocument("a", version, start, start + 5)
        return TraceRequest(float(arrival), (document,), start + 9, namespace=space)

    first = request(0)
    for other in (request(1, start=3), request(1, version="2"), request(1, space="tenant")):
        assert bound_of([first, other], 100, 100).hit_tokens == 0
    assert bound_of([first, request(1)], 100, 100).hit_tokens == 5


def test_what_precedes_a_salt_is_shared_with_all() -> None:
    def request(arrival: int, space: str, shared: int, shared_space: str = "") -> TraceRequest:
        documents = (TraceDocument("a", "", 2, 7), TraceDocument("b", "", 7, 12))
        return TraceRequest(float(arrival), documents, 15, 0, space, shared, shared_space)

    first = request(0, "one", 7)
    for other, found in (
        (request(1, "one", 7), 10),
        (request(1, "two", 7), 5),
        (request(1, "", 0), 5),
        (request(1, "one", 0), 0),
        (request(1, "one", 7, "adapter"), 0),
    ):
        assert bound_of([first, other], 100, 100).hit_tokens == found


def test_requests_without_documents_only_cost_time() -> None:
    trace = [TraceRequest(0.0, (), 10), TraceRequest(1.0, (), 10)]
    bound = bound_of(trace, 100, 100)
    assert (bound.hit_tokens, bound.saved_s) == (0, 0.0)
    assert bound.uncached_s == pytest.approx(2 * cost(0, 10))


def test_the_reference_cost_follows_its_arithmetic_between_grid_points() -> None:
    table = a10g_mistral_cost_table()
    for cached, new in ((0, 100), (1_700, 1_333), (3_000, 90), (20_100, 5_000)):
        operations = 2 * 7.2e9 * new + 4 * 32 * 4096 * new * (cached + new / 2)
        assert table(cached, new) == pytest.approx(0.015 + operations / 65e12, abs=3e-4)
