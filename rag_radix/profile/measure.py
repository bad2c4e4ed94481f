"""Takes the samples of a profile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rag_radix.profile.grid import Grid, Point
from rag_radix.profile.server import Capacity, Prefill, ProfiledServer, ProfileError

ATTEMPTS = 3
FLOOD_BATCH_TOKENS = 4096

_Item = TypeVar("_Item")


@dataclass(slots=True)
class Samples:
    """What was measured.

    Attributes:
        seconds: Samples of each point.
        discarded: Prefills that found another prefix cached than they were to find.
        host_problem: Why a host hit is missing, if one is.
    """

    seconds: dict[Point, list[float]] = field(default_factory=dict)
    discarded: int = 0
    host_problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Prefix:
    tokens: list[int]
    namespace: str


def measure(
    server: ProfiledServer,
    grid: Grid,
    capacity: Capacity,
    *,
    repeats: int,
    seed: int,
    progress: Callable[[int], object],
) -> Samples:
    """Measure every point of `grid` `repeats` times; the server's cache is emptied.

    A round takes each point once, in a new random order, so that a machine that slows down
    meanwhile slows all of them. Prefixes are made by a request of exactly their tokens, and
    every sample says what it found cached.

    Args:
        progress: Called with the number of samples taken, or given up, since the last call.

    Raises:
        ProfileError: The server can't be reached, is busy with other requests, or doesn't
            keep the prefixes.
    """
    prober = _Prober(server, grid, capacity, random.Random(seed))
    prober.warm_up()
    for _ in range(repeats):
        prober.device_round(progress)
        prober.host_round(progress)
    server.flush()
    return prober.samples


class _Prober:
    def __init__(
        self, server: ProfiledServer, grid: Grid, capacity: Capacity, numbers: random.Random
    ) -> None:
        self.samples = Samples()
        self._server = server
        self._grid = grid
        self._capacity = capacity
        self._numbers = numbers
        self._vocabulary = server.vocabulary()
        self._namespaces = 0
        self._used_tokens = 0
        self._warm: dict[int, _Prefix] = {}
        self._host_tokens = list(grid.hit_tokens)
        if not capacity.has_host_tier:
            self.samples.host_problem = (
                "the server has no host tier (--enable-hierarchical-cache adds one)"
            )

    def warm_up(self) -> None:
        """Pay the first-use costs of short and long passes, and of hits."""
        self._server.wait_until_idle()
        self._flush()
        for cached, new in (
            (0, self._grid.new_tokens[0]),
            (0, self._grid.new_tokens[-1]),
            (self._grid.cached_tokens[1], self._grid.new_tokens[0]),
        ):
            self._prefill_on_device(cached, new)

    def device_round(self, progress: Callable[[int], object]) -> None:
        self._flush()
        for point in self._shuffled(self._grid.device_points()):
            self._take(point)
            progress(1)

    def host_round(self, progress: Callable[[int], object]) -> None:
        """Let the device tier overflow, and time prefixes that come back from host memory.

        Prefixes that stay on device, or don't reach the host, are given up after some floods.
        """
        if not self._capacity.has_host_tier:
            return
        given_up = len(self._grid.hit_tokens) - len(self._host_tokens)
        pending = self._host_tokens
        for attempt in range(1, ATTEMPTS + 1):
            if not pending:
                break
            self._flush()
            prefixes = {length: self._make_prefix(length) for length in self._shuffled(pending)}
            self._flood(attempt * self._capacity.device_tokens)
            missed = []
            for length in self._shuffled(pending):
                point = self._grid.hit_point(length, "host")
                prefill = self._extend(prefixes[length], point.new_tokens)
                if (prefill.device_tokens, prefill.host_tokens) == (0, length):
                    self._record(point, prefill)
                    progress(1)
                else:
                    self.samples.discarded += 1
                    missed.append(length)
            pending = missed
        if pending:
            self._host_tokens = [n for n in self._host_tokens if n not in pending]
            self.samples.host_problem = (
                f"prefixes of {', '.join(map(str, sorted(pending)))} tokens weren't found on host "
                "after the device tier had been filled with other prompts: the replacement policy "
                "keeps or drops them, or the host tier is too small (try "
                "--radix-eviction-policy lru and a larger --hicache-ratio)"
            )
        progress(given_up + len(pending))

    def _take(self, point: Point) -> None:
        for _ in range(ATTEMPTS):
            prefill = self._prefill_on_device(point.cached_tokens, point.new_tokens)
            if (prefill.device_tokens, prefill.host_tokens) == (point.cached_tokens, 0):
                self._record(point, prefill)
                return
            self.samples.discarded += 1
            self._warm.pop(point.cached_tokens, None)
        raise ProfileError(
            f"{self._server.url} found {prefill.device_tokens} tokens on device and "
            f"{prefill.host_tokens} on host where {point.cached_tokens} had just been computed: "
            "profile a server that caches prefixes, has one data-parallel rank, and that nobody "
            "else uses"
        )

    def _prefill_on_device(self, cached: int, new: int) -> Prefill:
        """Extend a prefix that is on device; nothing is evicted meanwhile, which would cost."""
        if self._used_tokens + cached + new > self._capacity.device_tokens:
            self._flush()
        if not cached:
            prefix = self._new_prefix(0)
        else:
            prefix = self._warm.get(cached) or self._make_prefix(cached)
            self._warm[cached] = prefix
        return self._extend(prefix, new)

    def _new_prefix(self, length: int) -> _Prefix:
        self._namespaces += 1
        return _Prefix(self._tokens(length), f"rag-radix-profile-{self._namespaces}")

    def _make_prefix(self, length: int) -> _Prefix:
        """Have a new prefix computed, and so cached."""
        prefix = self._new_prefix(length)
        self._server.prefill(prefix.tokens, prefix.namespace, length)
        self._used_tokens += length
        return prefix

    def _extend(self, prefix: _Prefix, new: int) -> Prefill:
        tokens = prefix.tokens + self._tokens(new)
        self._used_tokens += new
        self._server.wait_until_idle()
        return self._server.prefill(tokens, prefix.namespace, len(prefix.tokens))

    def _flood(self, tokens: int) -> None:
        """Fill the device tier with prompts no longer than any prefix, so that none outranks them.

        A policy that weighs cost a token finds short prompts dear; these aren't documents, so
        the knowledge tree drops them instead of filling the host tier with them.
        """
        length = self._grid.hit_tokens[0]
        batch = max(min(FLOOD_BATCH_TOKENS, self._capacity.device_tokens // 2) // length, 1)
        for _ in range(-(-tokens // (batch * length))):
            self._namespaces += 1
            prompts = [self._tokens(length) for _ in range(batch)]
            self._server.fill(prompts, f"rag-radix-profile-{self._namespaces}")

    def _flush(self) -> None:
        self._server.flush()
        self._used_tokens = 0
        self._warm = {}

    def _record(self, point: Point, prefill: Prefill) -> None:
        self.samples.seconds.setdefault(point, []).append(prefill.seconds)

    def _tokens(self, count: int) -> list[int]:
        return self._numbers.choices(self._vocabulary, k=count)

    def _shuffled(self, items: Sequence[_Item]) -> list[_Item]:
        return self._numbers.sample(items, len(items))
