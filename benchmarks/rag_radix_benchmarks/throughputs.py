"""The throughput of each arm, as the RAGCache paper defines it and under one limit for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rag_radix_benchmarks.answers import agreement, check_same_model
from rag_radix_benchmarks.arms import NO_CACHE, Arm
from rag_radix_benchmarks.experiment import Experiment, turn
from rag_radix_benchmarks.load import Run
from rag_radix_benchmarks.results import late_share
from rag_radix_benchmarks.statistics import (
    TTFT_LIMIT_FACTOR,
    Served,
    Throughput,
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
        client_late_share: The largest of all runs; see `rag_radix_benchmarks.results.late_share`.
    """

    own_limit: Mapping[str, Sequence[Throughput]]
    common_limit: Mapping[str, Sequence[Throughput]] | None
    client_late_share: float = 0.0

    def as_json(self, reference: str) -> dict[str, Any]:
        return {
            "own_limit": _as_json(self.own_limit, reference),
            "common_limit": self.common_limit and _as_json(self.common_limit, reference),
        }


def search_throughputs(
    experiment: Experiment, arms: Sequence[Arm], reference: Arm, lowest: float, repeats: int
) -> Throughputs:
    """Search every arm in every repeat, from the rate `lowest` on.

    Raises:
        ConfigError: Runs are too short to overload a server.
        WrongArmError: An arm answers as another model would, at the rate that all are asked at.
    """
    late_shares: list[float] = []

    def run(arm: Arm, rate: float, repeat: int) -> Run:
        return experiment.run(experiment.trial(arm, OpenLoop(rate), repeat)).run

    def searched(arm: Arm, repeat: int, limit_s: float | None) -> Throughput:
        def serve(rate: float) -> Served:
            served = run(arm, rate, repeat)
            late_shares.append(late_share([served]))
            return Served.of(served.due_s, served.ttft_s)

        return throughput(serve, lowest, limit_s=limit_s, precision=PRECISION)

    def check_answers(arm: Arm) -> None:
        pairs = [[run(each, lowest, n) for n in range(repeats)] for each in (arm, reference)]
        check_same_model(reference.name, {arm.name: agreement(*pairs)})

    def all_searched(limits_s: Sequence[float | None]) -> dict[str, list[Throughput]]:
        found: dict[str, list[Throughput]] = {arm.name: [] for arm in arms}
        for repeat, limit_s in enumerate(limits_s):
            for arm in turn(arms, repeat):
                found[arm.name].append(searched(arm, repeat, limit_s))
        return found

    own = all_searched([None] * repeats)
    for arm in arms:
        if arm.programs.order == reference.programs.order:
            check_answers(arm)
    common = None
    if NO_CACHE in own:
        limits_s = [TTFT_LIMIT_FACTOR * each.mean_ttft_s[lowest] for each in own[NO_CACHE]]
        common = all_searched(limits_s)
    return Throughputs(own, common, max(late_shares))


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
