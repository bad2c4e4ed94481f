"""Where a search is cut into stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from rag_radix_frontend.errors import ArgumentError
from rag_radix_frontend.processes import PerProcess
from rag_radix_frontend.staged_search import check_positive

# Fewer stages than could be had: each costs about 50 µs, and a consumer more than that.
MIN_FIRST_STAGE_S = 0.0005
# A guess that is wrong costs its prefill. Two documents of 300,000, an eighth of the clusters
# visited: after a 16th of the search they are right for 81% of the queries, after a 64th for 42%.
MAX_DOUBLINGS = 4
_MEASURED_SEARCHES = 5

# A number of stages of equal work, or the fractions of the work after which they end, ascending
# to 1; None leaves it to measurement.
Stages = int | Sequence[float] | None


class Pace(PerProcess):
    """Where a search of some units of work (clusters, hops) is cut.

    By default each stage does as much as all before it, since what is found changes ever less;
    the first takes at least half a millisecond, so a search of less than one has one stage,
    and at least a 16th of the search.
    `search_once` runs a search from start to end; it is timed on first use, unless the stages
    were given. What is measured decides only when provisional results come, never the final.

    Raises:
        ArgumentError: `stages` is below 1, or its fractions don't ascend to 1.
    """

    def __init__(self, stages: Stages, search_once: Callable[[], object]) -> None:
        self._fractions = None if stages is None else _fractions(stages)
        self._search_once = search_once
        super().__init__()

    def _begin(self) -> None:
        self._lock = threading.Lock()

    def ends(self, work: int) -> list[int]:
        """Units of work after which a stage ends, strictly ascending, the last one `work`."""
        with self._lock:
            if self._fractions is None:
                self._search_once()  # the first one also compiles and fills caches
                search_s = min(_timed_s(self._search_once) for _ in range(_MEASURED_SEARCHES))
                self._fractions = doubling(search_s)
        return sorted({max(1, round(work * fraction)) for fraction in self._fractions})


def doubling(search_s: float) -> tuple[float, ...]:
    """Fractions of a search that takes this long, each twice the one before."""
    doublings = 0
    while doublings < MAX_DOUBLINGS and search_s >= 2 ** (doublings + 1) * MIN_FIRST_STAGE_S:
        doublings += 1
    return tuple(2.0 ** (i - doublings) for i in range(doublings + 1))


def _fractions(stages: int | Sequence[float]) -> tuple[float, ...]:
    if isinstance(stages, int):
        check_positive("stages", stages)
        return tuple((i + 1) / stages for i in range(stages))
    fractions = tuple(stages)
    ascending = all(low < high for low, high in pairwise((0.0, *fractions)))
    if not fractions or not ascending or fractions[-1] != 1:
        raise ArgumentError(
            f"stages must be a number or fractions that ascend to 1, as (0.25, 0.5, 1), not "
            f"{stages!r}"
        )
    return fractions


def _timed_s(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
