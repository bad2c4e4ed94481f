"""How long a comparison takes, from its plan and what a machine is taken to do."""

from __future__ import annotations

from collections.abc import Sequence

from rag_radix.replay.trace import TraceRequest
from rag_radix_benchmarks.ab_options import Plan
from rag_radix_benchmarks.arms import NO_CACHE
from rag_radix_benchmarks.study_file import Machine
from rag_radix_benchmarks.throughputs import LOWEST_SHARE

# Rates that a search of a throughput measures: it doubles the lowest one up to twice the capacity,
# and halves the last factor of two three times. By the capacity:
SEARCHED_SHARES = (*(LOWEST_SHARE * 2**n for n in range(5)), *(1.0,) * 3)
# The search under the limit of no-cache knows the rates of the first one: it may double once more,
# and halves anew.
SEARCHED_AGAIN_SHARES = (1.0,) * 4


def comparison_minutes(plan: Plan, throughput: bool, machine: Machine) -> float:
    """Minutes of `bench ab`, whose arms are all taken to be as fast."""
    part = plan.workload.part(0)
    warm_up_s = _tokens(part.warm_up) / machine.prompt_tokens_per_s
    measured_s = _tokens(part.measured) / machine.prompt_tokens_per_s
    capacity = len(part.measured) / measured_s
    # Parts of the capacity; where arrivals are slower than that, they are what is waited for.
    shares = [share for share in plan.shares for _ in plan.capacity_of]
    shares += [rate / capacity for rate in plan.rates] + [1.0] * len(plan.concurrencies)
    seconds = len(plan.arms) * plan.repeats * _runs_s(shares, warm_up_s, measured_s)
    capacities = plan.repeats if plan.shares else int(throughput)
    seconds += capacities * len(plan.capacity_of) * (warm_up_s + measured_s)
    if throughput:
        searches = len(plan.arms) * plan.repeats
        seconds += searches * _runs_s(SEARCHED_SHARES, warm_up_s, measured_s)
        if any(arm.name == NO_CACHE for arm in plan.arms):
            again = searches - plan.repeats  # all but no-cache itself
            seconds += again * _runs_s(SEARCHED_AGAIN_SHARES, warm_up_s, measured_s)
    started = sum(arm.url is None for arm in plan.arms)
    return (seconds + started * machine.server_start_s) / 60


def _runs_s(shares: Sequence[float], warm_up_s: float, measured_s: float) -> float:
    return sum(warm_up_s + measured_s / min(share, 1.0) for share in shares)


def _tokens(requests: Sequence[TraceRequest]) -> int:
    return sum(request.prompt_tokens for request in requests)
