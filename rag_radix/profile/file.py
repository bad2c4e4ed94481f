"""A profile as a file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import orjson

from rag_radix.cost_model import PROFILE_SCHEMA
from rag_radix.errors import ConfigError
from rag_radix.profile.grid import Grid, Point
from rag_radix.profile.measure import Samples
from rag_radix.profile.server import Conditions

TIMED_BY = "meta_info.e2e_latency"


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated samples of one thing.

    Attributes:
        median_s: Their median.
        relative_iqr: Their interquartile range over the median; 0 for a single sample.
    """

    median_s: float
    relative_iqr: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        median = statistics.median(samples)
        if len(samples) < 2:
            return cls(median, 0.0)
        first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, (third - first) / median)


@dataclass(frozen=True, slots=True)
class HitTimes:
    """The same prompt computed cold, behind a device hit and behind a host hit.

    Attributes:
        cached_tokens: Length of the prefix.
        host: None where no host hit could be brought about.
    """

    cached_tokens: int
    cold: Spread
    device: Spread
    host: Spread | None


@dataclass(frozen=True, slots=True)
class Profile:
    """What `rag-radix profile` measured.

    Attributes:
        conditions: What it holds for.
        date: When, ISO 8601 in UTC.
        repeats: Samples of each point.
        seed: Of prompts and order.
        cached_tokens: Grid of the cost table.
        new_tokens: Grid of the cost table.
        table: A row for each of `cached_tokens`, a column for each of `new_tokens`; None where
            the prompt is longer than the context.
        rest_tokens: New tokens behind each prefix of `hits`.
        hits: By ascending length.
        host_problem: Why a host hit is missing, if one is.
        discarded_samples: Prefills that found another prefix cached than they were to find.
    """

    conditions: Conditions
    date: str
    repeats: int
    seed: int
    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    table: tuple[tuple[Spread | None, ...], ...]
    rest_tokens: int
    hits: tuple[HitTimes, ...]
    host_problem: str | None
    discarded_samples: int

    @classmethod
    def of(
        cls, conditions: Conditions, grid: Grid, samples: Samples, *, repeats: int, seed: int
    ) -> Profile:
        """Sum samples up; every device point of `grid` has at least one."""
        spreads = {point: Spread.of(seconds) for point, seconds in samples.seconds.items()}
        return cls(
            conditions=conditions,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            repeats=repeats,
            seed=seed,
            cached_tokens=grid.cached_tokens,
            new_tokens=grid.new_tokens,
            table=tuple(
                tuple(
                    spreads[Point("device", cached, new)]
                    if cached + new <= grid.context_tokens
                    else None
                    for new in grid.new_tokens
                )
                for cached in grid.cached_tokens
            ),
            rest_tokens=grid.rest_tokens,
            hits=tuple(
                HitTimes(
                    length,
                    cold=spreads[grid.cold_point(length)],
                    device=spreads[grid.hit_point(length, "device")],
                    host=spreads.get(grid.hit_point(length, "host")),
                )
                for length in grid.hit_tokens
            ),
            host_problem=samples.host_problem,
            discarded_samples=samples.discarded,
        )

    @property
    def host_pays_from(self) -> int | Literal["always", "never"]:
        """Shortest prefix from which on loading it from host beats computing it.

        "always" when that holds for every length measured, "never" when it doesn't for the
        longest, or when no host hit was measured.
        """
        measured = [hit for hit in self.hits if hit.host is not None]
        paying = 0
        for hit in reversed(measured):
            if hit.host is None or hit.host.median_s >= hit.cold.median_s:
                break
            paying += 1
        if not paying:
            return "never"
        return "always" if paying == len(measured) else measured[-paying].cached_tokens

    def as_json(self) -> dict[str, Any]:
        """Plain values; `seconds` and the grid are what `PrefillCostTable.load` reads."""
        columns: dict[str, Any] = {}
        for name in ("cold", "device", "host"):
            spreads = [getattr(hit, name) for hit in self.hits]
            columns[f"{name}_s"] = [spread and spread.median_s for spread in spreads]
            columns[f"{name}_spread"] = [spread and spread.relative_iqr for spread in spreads]
        return {
            "schema": PROFILE_SCHEMA,
            **asdict(self.conditions),
            "date": self.date,
            "repeats": self.repeats,
            "seed": self.seed,
            "timed_by": TIMED_BY,
            "discarded_samples": self.discarded_samples,
            "cached_tokens": self.cached_tokens,
            "new_tokens": self.new_tokens,
            "seconds": [[spread and spread.median_s for spread in row] for row in self.table],
            "spread": [[spread and spread.relative_iqr for spread in row] for row in self.table],
            "hits": {
                "rest_tokens": self.rest_tokens,
                "cached_tokens": [hit.cached_tokens for hit in self.hits],
                **columns,
                "host_pays_from": self.host_pays_from,
                "host_problem": self.host_problem,
            },
        }

    def save(self, path: str | Path) -> None:
        """Write `as_json()`.

        Raises:
            ConfigError: The file can't be written.
        """
        try:
            Path(path).write_bytes(orjson.dumps(self.as_json(), option=orjson.OPT_INDENT_2) + b"\n")
        except OSError as error:
            raise ConfigError(f"the profile can't be written to {str(path)!r}: {error}") from error


def check_writable(option: str, path: Path) -> None:
    """Find out before a long measurement whether its result can be written.

    Args:
        option: Which names the file, such as "--output".
        path: The file.

    Raises:
        ConfigError: It can't be.
    """
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(
            f"{option} {str(path)!r} can't be written ({error.strerror}): give a file in a "
            "writable folder"
        ) from error
    if is_new:
        path.unlink()


def profile_mismatch(
    path: str | Path, served: Conditions, dtype: Callable[[str], str] = str
) -> str | None:
    """Say how a cost table's origin differs from the server that uses it, or None.

    Args:
        path: File of a cost table that has been loaded. Tables that weren't written by
            `rag-radix profile` don't say what they were measured on, and match anything.
        served: The server's. Models are compared by the last part of their paths.
        dtype: What the served model is computed in where SGLang is given this name, so that
            "auto" may be one side's word for it.
    """
    profile = orjson.loads(Path(path).read_bytes())
    meaning: dict[str, Callable[[str], str]] = {
        "model": lambda path: Path(path).name,
        "dtype": dtype,
    }

    def differ(name: str, value: Any) -> bool:
        means = meaning.get(name, str)
        return profile[name] != value and means(profile[name]) != means(value)

    different = [
        f"{name} {profile[name]}, not {value}"
        for name, value in asdict(served).items()
        if name in profile and differ(name, value)
    ]
    if not different:
        return None
    return (
        f"prefill-cost profile {str(path)!r} was measured with {'; '.join(different)}: "
        "measure this server with `rag-radix profile`"
    )
