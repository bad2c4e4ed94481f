"""The throughput of each arm, as the RAGCache paper defines it and under one limit for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rag_radix_benchmarks.arms import NO_CACHE, Arm
from rag_radix_benchmarks.experiment import Experiment, turn
from rag_radix_benchmarks.statistics import (
    TTFT_LIMIT_FACTOR,
    Throughput,
    distribution,
    paired_ratio,
    throughput,
)
from rag_radix_benchmarks.trials import OpenLoop

# Of a capacity: at this rate requests hardly ever meet.
LOWEST_SHARE = 0.1
PRECISION = 0.1


@dataclass(frozen=True)
class Throughputs:
    """What was searched.

    Attributes:
        own_limit: By arm and repeat, under five times the arm's own TTFT at the lowest rate: the
            paper's definition, which an arm that is fast when idle finds harder to meet.
        common_limit: Under five times that of `no-cache`; None where that is no arm.
    """

    own_limit: Mapping[str, Sequence[Throughput]]
    common_limit: Mapping[str, Sequence[Throughput]] | None

    def as_json(self, reference: str) -> dict[str, Any]:
        return {
            "own_limit": _as_json(self.own_limit, reference),
            "common_limit": self.common_limit and _as_json(self.common_limit, reference),
        }


def search_throughputs(
    experiment: Experiment, arms: Sequence[Arm], lowest: float, repeats: int
) -> Throughputs:
    """Search every arm in every repeat, from the rate `lowest` on.

    Raises:
        ConfigError: Runs are too short to overload a server.
    """

    def searched(arm: Arm, repeat: int, limit_s: float | None) -> Throughput:
        def mean_ttft_s(rate: float) -> float:
            run = experiment.run(experiment.trial(arm, OpenLoop(rate), repeat)).run
            return distribution(run.ttft_s)["mean"]

        return throughput(mean_ttft_s, lowest, limit_s=limit_s, precision=PRECISION)

    def all_searched(limits_s: Sequence[float | None]) -> dict[str, list[Throughput]]:
        found: dict[str, list[Throughput]] = {arm.name: [] for arm in arms}
        for repeat, limit_s in enumerate(limits_s):
            for arm in turn(arms, repeat):
                found[arm.name].append(searched(arm, repeat, limit_s))
        return found

    own = all_searched([None] * repeats)
    if NO_CACHE not in own:
        return Throughputs(own, None)
    limits_s = [TTFT_LIMIT_FACTOR * each.mean_ttft_s[lowest] for each in own[NO_CACHE]]
    return Throughputs(own, all_searched(limits_s))


def _as_json(found: Mapping[str, Sequence[Throughput]], reference: str) -> dict[str, Any]:
    """By arm: what was found in each repeat, and how often it goes into the reference's."""
    rates = {arm: [each.requests_per_s for each in of_arm] for arm, of_arm in found.items()}
    return {
        arm: {
            "requests_per_s": rates[arm],
            "limit_s": [each.limit_s for each in of_arm],
            "mean_ttft_s": [list(each.mean_ttft_s.items()) for each in of_arm],
            "reference_by_this": _ratio(rates[reference], rates[arm]),
        }
        for arm, of_arm in found.items()
    }


def _ratio(
    reference: Sequence[float | None], other: Sequence[float | None]
) -> dict[str, Any] | None:
    """None unless both have a throughput in every repeat."""
    pairs = [(a, b) for a, b in zip(reference, other, strict=True) if a and b]
    if len(pairs) < len(reference):
        return None
    return asdict(paired_ratio([a for a, _ in pairs], [b for _, b in pairs]))
