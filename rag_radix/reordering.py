"""In which order waiting requests are served: those that reuse most first, nobody kept forever.

Pure: knows neither SGLang nor clocks, so that all ranks of a server, which see the same requests,
arrive at the same order, and a replay at the order of a server.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rag_radix.cost_model import PrefillCostTable

# Long enough to be beyond what a pass costs at least.
_MARGINAL_TOKENS = 2048
# Windows of requests among which the best is looked for. Of 1, 4, 8 and the whole queue, replays
# of queues of 256 and 1,000 over three workloads had the least prefill time in all with 8.
_REACH_WINDOWS = 8


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue.

    Attributes:
        arrival: Its number; a later request has a higher one.
        priority: Lower ones go first, whatever the score; nobody is overtaken by them.
        speculative: Served when nothing else waits.
        score: `reuse_score` as of now.
        held: Something that is being computed is about to shorten it, so it goes last until
            it has been overtaken too often.
        served: It waits no more.
    """

    arrival: int
    priority: int = 0
    speculative: bool = False
    score: float = 0.0
    held: bool = False
    served: bool = False


def reuse_score(
    device_tokens: int, host_tokens: int, new_tokens: int, load_share: float = 0.0
) -> float:
    """Cached tokens by tokens to compute, the order of RAGCache (arXiv:2404.12457): of two
    requests that cost the same it favours the one that would lose more to an eviction, of two
    that reuse the same the one that is done sooner.

    Args:
        device_tokens: Cached on the device.
        host_tokens: Cached on host: loading one counts as computing `load_share` of one.
        new_tokens: To be computed.
        load_share: Time to load a token by time to compute one, 0 to 1.
    """
    loading = load_share * host_tokens
    return (device_tokens + host_tokens - loading) / max(new_tokens + loading, 1.0)


def load_share(prefill_cost: PrefillCostTable, load_s_per_token: float) -> float:
    """Time to load a token from host by time to compute one, at most 1."""
    short, long = (prefill_cost(0, tokens) for tokens in (_MARGINAL_TOKENS, 2 * _MARGINAL_TOKENS))
    return min(1.0, load_s_per_token * _MARGINAL_TOKENS / max(long - short, 1e-9))


W = TypeVar("W", bound=Waiting)


@dataclass
class _Line(Generic[W]):
    """The requests of one priority that wait, speculations apart.

    Attributes:
        by_age: As of the last `arrange`, oldest first.
        oldest: Index of the first of them that still waits.
        served: Arrivals, ascending, of those served that were younger than that one. Everybody
            served after a request has come waited together with it, so that how often it has
            been overtaken can be read off here.
    """

    by_age: list[W] = field(default_factory=list)
    oldest: int = 0
    served: list[int] = field(default_factory=list)

    def overtaken(self, request: Waiting) -> int:
        return len(self.served) - bisect_right(self.served, request.arrival)

    def front(self) -> W | None:
        """The oldest request that waits."""
        while self.oldest < len(self.by_age) and self.by_age[self.oldest].served:
            self.oldest += 1
        return self.by_age[self.oldest] if self.oldest < len(self.by_age) else None

    def forget(self) -> None:
        """Drop what is older than all that waits."""
        front = self.front()
        older = len(self.served) if front is None else bisect_right(self.served, front.arrival)
        del self.served[:older]


class ServingOrder(Generic[W]):
    """Orders a queue and counts who overtakes whom.

    No request is overtaken more than `window` times by younger ones of its priority, provided
    that one is served only if it `may_be_served`. The best is looked for among those that have
    waited longest, 8 windows of them: to overtake costs everybody who is overtaken, and in a
    longer queue a few requests from far behind would use up the windows of all others, which
    would then be served in the order of their arrival.

    Args:
        window: How many younger requests may be served before an older one.

    Attributes:
        window: As given.
        most_overtakings: The most that happened to one request.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._reach = _REACH_WINDOWS * window
        self.most_overtakings = 0
        self._lines: dict[int, _Line[W]] = {}

    def arrange(self, requests: Iterable[W]) -> list[W]:
        """All that wait, in the order in which they are to be served. O(n log n).

        Speculations come last, whatever has overtaken them.
        """
        lines: dict[int, _Line[W]] = defaultdict(_Line)
        speculations = []
        for request in requests:
            if request.speculative:
                speculations.append(request)
            else:
                lines[request.priority].by_age.append(request)
        order: list[W] = []
        for priority in sorted(lines):
            line = lines[priority]
            line.by_age.sort(key=lambda request: request.arrival)
            if priority in self._lines:
                line.served = self._lines[priority].served
                line.forget()
            order += self._arrange(line)
        self._lines = lines
        speculations.sort(key=lambda each: (each.priority, -each.score, each.arrival))
        return order + speculations

    def _arrange(self, line: _Line[W]) -> list[W]:
        order: list[W] = []
        placed: set[int] = set()
        unseen = (request for request in line.by_age if not request.held)
        near: list[tuple[float, int, W]] = []  # a heap, of which `live` aren't placed
        live = oldest = 0
        overtaken = line.overtaken(line.by_age[0])
        for position in range(len(line.by_age)):
            while line.by_age[oldest].arrival in placed:
                oldest += 1
                overtaken = line.overtaken(line.by_age[oldest])
            while live < self._reach and (request := next(unseen, None)) is not None:
                heapq.heappush(near, (-request.score, request.arrival, request))
                live += 1
            while near and near[0][1] in placed:
                heapq.heappop(near)
            # All that are older than `oldest` are placed, so all else that is placed is younger.
            may_be_overtaken = overtaken + position - oldest < self.window
            chosen = near[0][2] if near and may_be_overtaken else line.by_age[oldest]
            order.append(chosen)
            placed.add(chosen.arrival)
            live -= not chosen.held
        return order

    def may_be_served(self, request: Waiting) -> bool:
        """Whether serving it now would overtake nobody too often. For what is served out of
        the order that `arrange` gave."""
        if request.speculative:
            return True
        line = self._lines[request.priority]
        front = line.front()
        assert front is not None, "it waits itself"
        return front.arrival >= request.arrival or line.overtaken(front) < self.window

    def overtaken(self, request: Waiting) -> int:
        """How many younger requests have been served before it."""
        return 0 if request.speculative else self._lines[request.priority].overtaken(request)

    def serve(self, request: Waiting) -> None:
        """Note that it is being served, and waits no more."""
        request.served = True
        if request.speculative:
            return
        line = self._lines[request.priority]
        insort(line.served, request.arrival)
        line.forget()
        self.most_overtakings = max(self.most_overtakings, len(line.served))
