"""What a ratio says in words, from its interval alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_radix_benchmarks.arms import parse_arms

# An interval around 1 that ends within this part of 1 is as good as equal.
EQUAL_WITHIN = 0.03

FASTER, EQUAL, SLOWER = "faster", "equal", "slower"
OPEN, ONCE = "open", "one repeat"

MEANINGS = {
    FASTER: "the interval lies above 1",
    EQUAL: f"it holds 1 and lies within {EQUAL_WITHIN:.0%} of it",
    SLOWER: "it lies below 1",
    OPEN: "it holds 1 and is wider: these repeats don't tell",
    ONCE: "no interval",
}

# CPU time of choosing batches that a request may take, as in the RAGCache paper.
SCHEDULING_BAR_S = 1e-3

# Shares of a bound are sums of times: what they differ by less is nothing.
_ROUNDING = 1e-6


def reading(ratio: Mapping[str, Any]) -> str:
    """Whether the reference of an arm ÷ reference is faster than the arm."""
    low, high = ratio["low"], ratio["high"]
    if low is None:
        return ONCE
    if low > 1:
        return FASTER
    if high < 1:
        return SLOWER
    within = low >= 1 - EQUAL_WITHIN and high <= 1 / (1 - EQUAL_WITHIN)
    return EQUAL if within else OPEN


def never_worse(ratio: Mapping[str, Any]) -> bool:
    """Whether an interval reaches 1, or begins so close to it that it's no matter."""
    if ratio["low"] is None:
        return bool(ratio["value"] >= 1 - EQUAL_WITHIN)
    return bool(ratio["high"] >= 1 or ratio["low"] >= 1 - EQUAL_WITHIN)


def summary(readings: Sequence[str]) -> str:
    """How often each was read, in the order of `MEANINGS`."""
    counts = {each: readings.count(each) for each in MEANINGS}
    return ", ".join(f"{count} {each}" for each, count in counts.items() if count)


def prefill_ratios(
    arm: Mapping[str, Any], ours: Mapping[str, Any], saved_share: float
) -> dict[str, float] | None:
    """An arm's modelled prefill time beside ours and the bound's, from their shares of the bound.

    Args:
        arm: Figures of the arm.
        ours: Figures of the arm that it is compared with.
        saved_share: Part of the prefill time that the bound saves.

    Returns:
        `reached`: its time over ours. `possible`: its time over the bound's. `of_rest`: of what
        the bound could still save it, the part that ours saves; absent where that is nothing.
        None where hits aren't known.
    """
    theirs, own = arm["share_of_bound"], ours["share_of_bound"]
    if theirs is None or own is None:
        return None
    left = 1 - theirs * saved_share
    ratios = {
        "reached": left / (1 - own * saved_share),
        "possible": left / (1 - saved_share),
    }
    # A server that reorders its queue may be above a bound in order of arrival.
    if theirs < 1 - _ROUNDING:
        ratios["of_rest"] = (own - theirs) / (1 - theirs)
    return ratios


def arms_of_other_prompts(report: Mapping[str, Any]) -> list[str]:
    """Arms that put a prompt's documents in another order than the reference of `bench ab` does."""
    orders = {arm.name: arm.programs.order for arm in parse_arms(report["config"]["arms"])}
    return [arm for arm, order in orders.items() if order != orders[report["reference"]]]


@dataclass(frozen=True)
class SchedulingBar:
    """Which arms keep the bar of scheduling at a load, of those whose servers tell the time."""

    within: tuple[str, ...]
    over: tuple[str, ...]

    @classmethod
    def of(cls, by_arm: Mapping[str, Any]) -> SchedulingBar:
        """From the figures of the arms."""
        times = {arm: figures["scheduling_s"] for arm, figures in by_arm.items()}
        known = {arm: seconds for arm, seconds in times.items() if seconds is not None}
        return cls(
            within=tuple(arm for arm, seconds in known.items() if seconds <= SCHEDULING_BAR_S),
            over=tuple(arm for arm, seconds in known.items() if seconds > SCHEDULING_BAR_S),
        )

    def __str__(self) -> str:
        """Empty where no server tells."""
        bar = f"the bar of {1e3 * SCHEDULING_BAR_S:g} ms of scheduling a request"
        if not self.over:
            return f"{bar} holds with every arm" if self.within else ""
        holds = f"holds with {', '.join(self.within)}, not" if self.within else "doesn't hold"
        return f"{bar} {holds} with {', '.join(self.over)}"
