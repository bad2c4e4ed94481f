"""Prefill cost `T(cached, new)`: seconds to compute new tokens behind cached ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import orjson

from rag_radix.errors import ConfigError

PROFILE_SCHEMA = 1


@dataclass(frozen=True)
class PrefillCostTable:
    """Prefill seconds on a grid, interpolated bilinearly (RAGCache, arXiv:2404.12457).

    Beyond the grid its outermost cells are extended linearly, but a cost is never below that of
    the nearest point of the grid: a pass shorter than the shortest measured costs as much as
    that one, and a noisy profile can't make long prefills cheap or negative.

    Attributes:
        cached_tokens: Ascending grid of cached prefix lengths, at least two.
        new_tokens: Ascending grid of extend lengths, at least two, positive.
        seconds: `seconds[i][j]` belongs to `cached_tokens[i]`, `new_tokens[j]`; positive.

    Raises:
        ConfigError: A grid isn't ascending or the table has another shape.
    """

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, grid, lowest in (
            ("cached_tokens", self.cached_tokens, 0),
            ("new_tokens", self.new_tokens, 1),
        ):
            ascending = all(a < b for a, b in pairwise(grid))
            if len(grid) < 2 or not ascending or grid[0] < lowest:
                raise ConfigError(
                    f"{name}={list(grid)} of the prefill-cost table: give at least two "
                    f"ascending values from {lowest}"
                )
        shape = (len(self.cached_tokens), len(self.new_tokens))
        if len(self.seconds) != shape[0] or any(len(row) != shape[1] for row in self.seconds):
            raise ConfigError(
                f"'seconds' of the prefill-cost table must be {shape[0]} x {shape[1]}, one row "
                "for each of 'cached_tokens', one column for each of 'new_tokens'"
            )
        if any(cost <= 0 for row in self.seconds for cost in row):
            raise ConfigError("'seconds' of the prefill-cost table must all be positive")

    def __call__(self, cached_tokens: int, new_tokens: int) -> float:
        """Seconds to compute `new_tokens` behind `cached_tokens`."""
        cost = self._extended(cached_tokens, new_tokens)
        cached, new = self.cached_tokens, self.new_tokens
        if cached[0] <= cached_tokens <= cached[-1] and new[0] <= new_tokens <= new[-1]:
            return cost
        nearest_cached = min(max(cached_tokens, cached[0]), cached[-1])
        nearest_new = min(max(new_tokens, new[0]), new[-1])
        return max(cost, self._extended(nearest_cached, nearest_new))

    def _extended(self, cached_tokens: int, new_tokens: int) -> float:
        i, u = _cell(self.cached_tokens, cached_tokens)
        j, v = _cell(self.new_tokens, new_tokens)
        (a, b), (c, d) = self.seconds[i][j : j + 2], self.seconds[i + 1][j : j + 2]
        return (1 - u) * ((1 - v) * a + v * b) + u * ((1 - v) * c + v * d)

    @classmethod
    def load(cls, path: str | Path) -> PrefillCostTable:
        """Read a profile, or any JSON object with the three attributes as its keys.

        `seconds` may end a row with nulls, where the prompt is longer than the context and
        can't be measured: such a row goes on growing as the row above it does.

        Raises:
            ConfigError: The file can't be read or isn't such an object.
        """
        try:
            table = orjson.loads(Path(path).read_bytes())
            if table.get("schema", PROFILE_SCHEMA) != PROFILE_SCHEMA:
                raise ConfigError(
                    f"its schema is {table['schema']}, this version's is {PROFILE_SCHEMA}: measure "
                    "again with `rag-radix profile`"
                )
            return cls(
                tuple(table["cached_tokens"]),
                tuple(table["new_tokens"]),
                _completed(table["seconds"]),
            )
        except ConfigError as error:
            raise ConfigError(f"prefill-cost table {str(path)!r}: {error}") from error
        except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"prefill-cost table {str(path)!r} can't be used ({error!r}): give a file of "
                "`rag-radix profile`, or JSON with 'cached_tokens', 'new_tokens' and 'seconds'"
            ) from error


def _cell(grid: Sequence[int], value: int) -> tuple[int, float]:
    """Index of the grid cell for `value` and where it lies in it (0 to 1 inside the grid)."""
    index = bisect_right(grid, value, 1, len(grid) - 1) - 1
    return index, (value - grid[index]) / (grid[index + 1] - grid[index])


def _completed(rows: Sequence[Sequence[float | None]]) -> tuple[tuple[float, ...], ...]:
    """Replace the nulls at the end of rows: growth from column to column is the row above's."""
    completed: list[tuple[float, ...]] = []
    for row in rows:
        costs: list[float] = []
        for column, cost in enumerate(row):
            if cost is None:
                above = completed[-1]
                cost = costs[-1] * above[column] / above[column - 1]
            costs.append(cost)
        completed.append(tuple(costs))
    return tuple(completed)


def default_cost_table(
    *, layers: int, hidden_size: int, intermediate_size: int, context_tokens: int
) -> PrefillCostTable:
    """A table from the model's shape alone, for servers that weren't profiled.

    Counts a transformer's multiply-adds, `12 h^2`-like linear work for each new token and
    `2 h` for each pair of a new token and one it attends to, at a nominal 10^13 a second,
    plus 5 ms for a pass. Only ratios matter to a policy: what the table gets right is that
    attention makes a token behind a long prefix dearer and that short extends waste a pass.
    """
    linear = layers * (4 * hidden_size**2 + 3 * hidden_size * intermediate_size)
    attention = layers * 2 * hidden_size

    def seconds(cached: int, new: int) -> float:
        return 0.005 + (linear * new + attention * new * (cached + new / 2)) / 1e13

    top = max(context_tokens, 2048)
    cached_grid = (0, *_powers_of_two(512, top))
    new_grid = (1, *_powers_of_two(16, top))
    return PrefillCostTable(
        cached_grid,
        new_grid,
        tuple(tuple(seconds(cached, new) for new in new_grid) for cached in cached_grid),
    )


def _powers_of_two(first: int, last: int) -> tuple[int, ...]:
    return tuple(first << step for step in range((last // first).bit_length()))
