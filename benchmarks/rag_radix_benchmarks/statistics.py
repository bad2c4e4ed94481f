"""Figures of repeated runs: distributions, ratios with an interval, and throughput."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rag_radix.errors import ConfigError
from rag_radix_benchmarks.figures import percentile

CONFIDENCE = 0.95
# The RAGCache paper's definition of throughput (arXiv:2404.12457, section 7.1).
TTFT_LIMIT_FACTOR = 5.0
# A rate that many times the lowest one is beyond what a search goes to.
SEARCH_SPAN = 1024


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of all values of an arm."""
    return {
        "mean": math.fsum(values) / len(values),
        **{f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)},
    }


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two arms over pairs of runs that were asked the same.

    Attributes:
        value: Geometric mean over the pairs.
        low: Lower end of its confidence interval; None for a single pair.
        high: Upper end.
        pairs: Their number.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int


def paired_ratio(
    theirs: Sequence[float], ours: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio:
    """`theirs / ours` with Student's interval on the logarithms, pair by pair.

    Whatever all arms of a pair share - its requests, the state of the machine - cancels out.
    The interval says how other repeats would come out, and assumes that the logarithms of the
    ratios are about normal.

    Args:
        theirs: One positive figure a pair.
        ours: Of the same pairs.
        confidence: Of the interval, between 0 and 1.
    """
    logs = [math.log(a / b) for a, b in zip(theirs, ours, strict=True)]
    pairs = len(logs)
    mean = math.fsum(logs) / pairs
    if pairs < 2:
        return Ratio(math.exp(mean), None, None, pairs)
    from scipy.stats import t

    variance = math.fsum((log - mean) ** 2 for log in logs) / (pairs - 1)
    half = float(t.ppf(0.5 + confidence / 2, pairs - 1)) * math.sqrt(variance / pairs)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), pairs)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Highest rate that an arm serves while its mean TTFT stays under a limit.

    Attributes:
        requests_per_s: That rate, or that at which its requests were really answered, where these
            are fewer; None where the lowest rate is over the limit already.
        limit_s: The limit.
        mean_ttft_s: By rate, all that was measured, ascending.
    """

    requests_per_s: float | None
    limit_s: float
    mean_ttft_s: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Served:
    """How a server coped with a rate.

    A run of few requests ends before a queue is long: its mean alone is under a limit at rates
    that no server could keep up.

    Attributes:
        mean_ttft_s: Of all requests.
        late_ttft_s: Mean of those that came last, a third of all: longer where a queue grows.
        requests_per_s: At which first tokens came, from the first to the last of them: that of
            the arrivals, unless the server can't do it.
    """

    mean_ttft_s: float
    late_ttft_s: float
    requests_per_s: float

    @classmethod
    def of(cls, due_s: Sequence[float], ttft_s: Sequence[float]) -> Served:
        """From when requests were due and how long each took to its first token.

        Args:
            due_s: In seconds, ascending.
            ttft_s: Of the same requests.
        """
        last = ttft_s[-math.ceil(len(ttft_s) / 3) :]
        first_tokens_s = [due + ttft for due, ttft in zip(due_s, ttft_s, strict=True)]
        span_s = max(first_tokens_s) - min(first_tokens_s)
        return cls(
            mean_ttft_s=math.fsum(ttft_s) / len(ttft_s),
            late_ttft_s=math.fsum(last) / len(last),
            requests_per_s=(len(ttft_s) - 1) / span_s if span_s else math.inf,
        )


def throughput(
    serve: Callable[[float], Served],
    lowest: float,
    *,
    limit_s: float | None = None,
    precision: float = 0.05,
) -> Throughput:
    """Search the highest rate whose mean TTFT stays under a limit, that of its last third as well.

    The rate is doubled until it is over the limit, and the last factor of two is halved on a
    logarithmic scale; every rate is measured once. Should the TTFT not grow with the rate
    everywhere, this is the end of the first stretch under the limit that doubling finds.

    Args:
        serve: Measures a rate in requests a second.
        lowest: The rate at which the server is as good as idle.
        limit_s: By default, five times the mean TTFT at `lowest`, as in the RAGCache paper.
        precision: The result is at most this part below the first rate known to be over.

    Raises:
        ConfigError: No rate overloads the arm: its runs are too short.
    """
    measured = {lowest: serve(lowest)}
    limit = TTFT_LIMIT_FACTOR * measured[lowest].mean_ttft_s if limit_s is None else limit_s

    def is_under(rate: float) -> bool:
        if rate not in measured:
            measured[rate] = serve(rate)
        return max(measured[rate].mean_ttft_s, measured[rate].late_ttft_s) <= limit

    def found(rate: float | None) -> Throughput:
        means = {each: served.mean_ttft_s for each, served in sorted(measured.items())}
        return Throughput(rate and min(rate, measured[rate].requests_per_s), limit, means)

    if not is_under(lowest):
        return found(None)
    under, over = lowest, 2 * lowest
    while is_under(over):
        if over > SEARCH_SPAN * lowest:
            raise ConfigError(
                f"at {over:g} requests/s the mean TTFT is still "
                f"{measured[over].mean_ttft_s:.3g} s, under the limit of {limit:.3g} s: a run must "
                "have more requests to overload the server"
            )
        under, over = over, 2 * over
    while over / under > 1 + precision:
        middle = math.sqrt(under * over)
        if is_under(middle):
            under = middle
        else:
            over = middle
    return found(under)
