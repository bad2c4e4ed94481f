"""Measuring, against a server that takes the time it is told to."""

from __future__ import annotations

import itertools

import pytest

from rag_radix.profile import server as server_module
from rag_radix.profile.grid import build_grid
from rag_radix.profile.measure import measure
from rag_radix.profile.server import ProfiledServer, ProfileError

from .fake_sglang import LOAD_TOKEN_S, FakeSGLang, prefill_s


def run(fake, *, repeats=1, seed=0, api_key=None):
    counts = []
    with fake.serving() as url:
        server = ProfiledServer(url, api_key)
        conditions, capacity = server.describe()
        grid = build_grid(capacity.prompt_tokens, conditions.page_size)
        samples = measure(
            server, grid, capacity, repeats=repeats, seed=seed, progress=counts.append
        )
    assert sum(counts) == repeats * (
        len(grid.device_points()) + (len(grid.hit_tokens) if fake.has_host_tier else 0)
    )
    return grid, samples


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_point_gets_its_own_time_from_both_tiers(page_size):
    grid, samples = run(FakeSGLang(page_size=page_size), repeats=2)
    hosts = {grid.hit_point(length, "host") for length in grid.hit_tokens}
    assert set(samples.seconds) == set(grid.device_points()) | hosts
    for point, seconds in samples.seconds.items():
        loaded = point.cached_tokens if point.tier == "host" else 0
        expected = prefill_s(point.cached_tokens, point.new_tokens, loaded)
        assert seconds == [pytest.approx(expected)] * 2
    assert samples.discarded == 0
    assert samples.host_problem is None


def test_nothing_is_evicted_while_device_hits_are_timed():
    grid, samples = run(FakeSGLang(device_tokens=256, has_host_tier=False), repeats=2)
    assert samples.discarded == 0
    assert set(samples.seconds) == set(grid.device_points())


def test_the_order_is_another_one_in_every_round_and_the_same_for_a_seed():
    def order(seed):
        fake = FakeSGLang(has_host_tier=False)
        run(fake, repeats=2, seed=seed)
        return fake.prompts

    assert order(1) == order(1)
    assert order(1) != order(2)
    points = len(build_grid(256, 1).device_points())
    first, second = order(1)[-2 * points : -points], order(1)[-points:]
    assert sorted(first) != first
    assert first != second


def test_a_sample_that_found_another_prefix_is_taken_again_and_counted():
    warm_up = 4
    fake = FakeSGLang(has_host_tier=False, forgets=frozenset(range(warm_up, 40, 7)))
    grid, samples = run(fake)
    assert samples.discarded > 0
    for point, seconds in samples.seconds.items():
        assert seconds == [pytest.approx(prefill_s(point.cached_tokens, point.new_tokens))]
    assert set(samples.seconds) == set(grid.device_points())


def test_a_server_that_caches_nothing_is_refused():
    with pytest.raises(ProfileError, match="found 0 tokens on device"):
        run(FakeSGLang(reuses=False))


def test_a_server_without_a_host_tier_has_no_host_hits():
    _, samples = run(FakeSGLang(has_host_tier=False))
    assert "--enable-hierarchical-cache" in samples.host_problem
    assert not any(point.tier == "host" for point in samples.seconds)


def test_prefixes_that_stay_on_device_are_given_up_once():
    fake = FakeSGLang(evicts=False)
    grid, samples = run(fake, repeats=2)
    assert "lru" in samples.host_problem
    assert not any(point.tier == "host" for point in samples.seconds)
    assert samples.discarded == 3 * len(grid.hit_tokens)


def test_a_busy_server_is_refused(monkeypatch):
    monkeypatch.setattr(server_module, "IDLE_LIMIT_S", 0.1)
    with pytest.raises(ProfileError, match="busy with 3 requests"):
        run(FakeSGLang(requests_of_others=3))


def test_a_short_request_of_others_is_waited_for(monkeypatch):
    fake = FakeSGLang(has_host_tier=False)
    busy = itertools.chain([1], itertools.repeat(0))
    loads = fake.loads

    def changing():
        fake.requests_of_others = next(busy)
        return loads()

    monkeypatch.setattr(fake, "loads", changing)
    run(fake)


def test_the_api_key_is_sent():
    run(FakeSGLang(has_host_tier=False, api_key="secret"), api_key="secret")
    with pytest.raises(ProfileError, match=r"server_info answers 401"):
        run(FakeSGLang(api_key="secret"))


def test_a_server_that_is_not_there_is_named():
    with FakeSGLang().serving() as url:
        pass
    with pytest.raises(ProfileError, match=f"{url}/server_info can't be reached"):
        ProfiledServer(url).describe()


def test_a_slow_host_is_seen():
    _, samples = run(FakeSGLang(load_token_s=100 * LOAD_TOKEN_S))
    host = {p: s for p, s in samples.seconds.items() if p.tier == "host"}
    assert host
    assert all(
        seconds[0] > prefill_s(0, p.cached_tokens + p.new_tokens) for p, seconds in host.items()
    )
