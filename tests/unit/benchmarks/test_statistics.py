"""Figures of repeated runs, on data whose answers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rag_radix_benchmarks.statistics import Served, distribution, paired_ratio, throughput

from rag_radix.errors import ConfigError


def test_a_distribution_is_mean_and_interpolated_percentiles():
    figures = distribution([float(value) for value in range(101)])
    assert figures == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99})


def test_a_ratio_is_the_geometric_mean_of_the_pairs():
    ratio = paired_ratio([2.0, 8.0], [1.0, 1.0])
    assert ratio.value == pytest.approx(4)
    assert ratio.pairs == 2


def test_the_interval_is_students_on_the_logarithms():
    # Logarithms 1, 2, 3: mean 2, standard error 1 / sqrt(3), quantile of 2 degrees 4.302653.
    ratio = paired_ratio([math.e, math.e**2, math.e**3], [1, 1, 1])
    half = 4.302653 / math.sqrt(3)
    assert math.log(ratio.low) == pytest.approx(2 - half, abs=1e-5)
    assert math.log(ratio.high) == pytest.approx(2 + half, abs=1e-5)


def test_what_both_arms_of_a_pair_share_cancels_out():
    noise = [1.0, 7.0, 0.3, 2.5]
    ratio = paired_ratio([2 * each for each in noise], noise)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


def test_exchanging_the_arms_inverts_ratio_and_interval():
    theirs, ours = [1.0, 2.0, 4.0], [1.1, 1.3, 1.7]
    there, back = paired_ratio(theirs, ours), paired_ratio(ours, theirs)
    assert back.value == pytest.approx(1 / there.value)
    assert (back.low, back.high) == pytest.approx((1 / there.high, 1 / there.low))


def test_one_pair_has_no_interval():
    ratio = paired_ratio([3.0], [2.0])
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(1.5), None, None)


@pytest.mark.parametrize("pairs", [3, 6])
def test_the_interval_covers_the_true_ratio_as_often_as_it_says(pairs):
    rng = np.random.default_rng(0)
    trials = 1_000
    covered = 0
    for _ in range(trials):
        ours = rng.lognormal(0, 0.5, pairs)
        theirs = ours * 1.3 * rng.lognormal(0, 0.1, pairs)
        ratio = paired_ratio(theirs.tolist(), ours.tolist())
        covered += ratio.low <= 1.3 <= ratio.high
    assert covered / trials == pytest.approx(0.95, abs=0.025)


def queue(service_s):
    """A single server with Poisson arrivals and constant service, in steady state."""

    def serve(rate):
        load = rate * service_s
        ttft_s = math.inf if load >= 1 else service_s * (1 + load / (2 * (1 - load)))
        return Served(ttft_s, ttft_s, min(rate, 1 / service_s))

    return serve


def simulated_queue(service_s, requests, seed):
    """The same server from empty, for a run of so many requests: the same gaps at every rate."""
    gaps = np.random.default_rng(seed).exponential(size=requests - 1)
    due = np.concatenate([[0], np.cumsum(gaps / gaps.mean())])

    def serve(rate):
        free_s, ttft_s = 0.0, []
        for due_s in due / rate:
            free_s = max(free_s, due_s) + service_s
            ttft_s.append(free_s - due_s)
        return Served.of((due / rate).tolist(), ttft_s)

    return serve


@pytest.mark.parametrize("requests", [30, 100])
def test_a_short_run_finds_no_throughput_above_the_capacity(requests):
    capacity, tolerance = 10.0, 0.02
    found = [
        throughput(simulated_queue(1 / capacity, requests, seed), lowest=1.0).requests_per_s
        for seed in range(50)
    ]
    assert max(found) <= capacity * (1 + tolerance)
    # In steady state it is eight ninths of it; so it is here, on average over the arrivals.
    assert np.mean(found) == pytest.approx(8 / 9 * capacity, rel=0.1)


def test_the_mean_alone_would_let_a_short_run_pass_far_above_the_capacity():
    # What the test above is there for: 30 requests at 1.25 times what the server can do.
    served = simulated_queue(0.1, 30, seed=0)(12.5)
    assert served.mean_ttft_s < 0.5 < served.late_ttft_s
    assert served.requests_per_s == pytest.approx(10, rel=0.02)


def test_throughput_of_a_known_queue_is_found_to_the_precision_asked_for():
    # TTFT is 5 times the service time at load 8/9; at the lowest rate it is a little longer.
    found = throughput(queue(0.1), lowest=0.01, precision=0.01)
    assert found.limit_s == pytest.approx(0.5, rel=1e-3)
    assert found.requests_per_s == pytest.approx(80 / 9, rel=0.01)
    assert found.requests_per_s <= 80 / 9 * 1.001


def test_throughput_under_a_given_limit():
    found = throughput(queue(0.1), lowest=0.5, limit_s=0.15, precision=0.01)
    assert found.requests_per_s == pytest.approx(5, rel=0.01)
    assert all(rate <= 2 * 5.05 for rate in found.mean_ttft_s)


def test_every_rate_is_measured_once_and_all_are_reported_in_order():
    asked = []

    def serve(rate):
        asked.append(rate)
        return queue(0.2)(rate)

    found = throughput(serve, lowest=0.25)
    assert len(asked) == len(set(asked))
    assert list(found.mean_ttft_s) == sorted(asked)


def test_a_server_that_is_too_slow_when_idle_has_no_throughput():
    found = throughput(queue(0.1), lowest=0.5, limit_s=0.05)
    assert found.requests_per_s is None


def test_a_run_too_short_to_overload_a_server_is_said_to_be():
    with pytest.raises(ConfigError, match="more requests"):
        throughput(lambda rate: Served(0.1, 0.1, rate), lowest=0.5)
