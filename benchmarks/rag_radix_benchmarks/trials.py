"""One measured run as a value, and a file that keeps those that are done."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from rag_radix.errors import ConfigError
from rag_radix_benchmarks.arms import Arm
from rag_radix_benchmarks.digest import code_digest
from rag_radix_benchmarks.facts import Counters, ServerFacts
from rag_radix_benchmarks.figures import commit, environment
from rag_radix_benchmarks.kept import open_lines
from rag_radix_benchmarks.load import Outcome, Run
from rag_radix_benchmarks.setup import Setup
from rag_radix_benchmarks.workload import Workload

# That may decide how a run goes.
CODE = ("rag_radix", "rag_radix_frontend", "rag_radix_kernels", "rag_radix_benchmarks")


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come at a mean rate, whatever became of those before."""

    requests_per_s: float

    def __str__(self) -> str:
        return f"{self.requests_per_s:g} requests/s"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many requests are always under way."""

    concurrency: int

    def __str__(self) -> str:
        return f"{self.concurrency} at once"


Load = OpenLoop | ClosedLoop


@dataclass(frozen=True)
class Trial:
    """All that decides what a run is: one arm, asked one part of the workload at one load."""

    setup: Setup
    arm: Arm
    workload: Workload
    load: Load
    repeat: int

    @property
    def key(self) -> str:
        """Equal for equal trials of the same code on such a machine, in any process."""
        fields = {
            "model": self.setup.model_path,
            "flags": self.setup.flags(self.arm),
            "url": self.arm.url,
            "programs": asdict(self.arm.programs),
            "workload": [type(self.workload).__name__, vars(self.workload)],
            "load": [type(self.load).__name__, asdict(self.load)],
            "repeat": self.repeat,
            "measured_by": _measured_by(),
        }
        return hashlib.blake2b(orjson.dumps(fields), digest_size=8).hexdigest()

    def __str__(self) -> str:
        return f"{self.arm.name}, {self.load}, repeat {self.repeat + 1}"


@functools.cache
def _measured_by() -> list[Any]:
    """Code, versions and processor: a run of others is another run."""
    here = environment()
    hardware = {name: here["hardware"][name] for name in ("processor", "cores")}
    return [code_digest(*CODE), here["versions"], hardware]


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial.

    Attributes:
        run: The measured requests.
        facts: What the server said of itself.
        commit: Of the checkout that it was measured with; see `rag_radix_benchmarks.figures`.
        scheduling_parts_s: CPU time that scheduling took meanwhile, by part, where it tells; see
            `rag_radix_benchmarks.facts.Counters`.
        moved: Bytes copied to host (`out`) and back (`in`) meanwhile; None without a host tier.
        tree: Its `/rag/stats` at the end.
        evicted_tokens: That left each tier meanwhile, by the tier's name; None where the server
            doesn't count them.
    """

    run: Run
    facts: ServerFacts
    commit: str | None = None
    scheduling_parts_s: Mapping[str, float] | None = None
    moved: Mapping[str, int] | None = None
    tree: Mapping[str, Any] | None = None
    evicted_tokens: Mapping[str, int] | None = None

    @classmethod
    def of(cls, run: Run, facts: ServerFacts, before: Counters, after: Counters) -> TrialResult:
        """A run with what a server counted during it."""
        parts_s, moved, evicted = None, None, None
        if before.scheduling_parts_s is not None and after.scheduling_parts_s is not None:
            parts_s = {
                part: seconds - before.scheduling_parts_s[part]
                for part, seconds in after.scheduling_parts_s.items()
            }
        if before.moved_bytes is not None and after.moved_bytes is not None:
            moved = {way: after.moved_bytes[way] - before.moved_bytes[way] for way in ("out", "in")}
        if before.tree is not None and after.tree is not None:
            evicted = {
                tier: after.tree[tier]["evicted_tokens"] - before.tree[tier]["evicted_tokens"]
                for tier in ("device", "host")
                if after.tree[tier] is not None
            }
        return cls(run, facts, commit(), parts_s, moved, after.tree, evicted)


class TrialStore:
    """Finished trials, one JSON line each; a line is written as a whole or not at all.

    Args:
        path: File to read and append to; None keeps them in memory only.

    Raises:
        ConfigError: The file can't be written, or holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._results: dict[str, TrialResult] = {}
        self._file: FileIO | None = None
        if path is None:
            return
        self._file, lines = open_lines(path)
        for number, line in enumerate(lines, 1):
            try:
                fields = orjson.loads(line)
                self._results[fields["key"]] = _parse(fields["result"])
            except (LookupError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path}:{number} is no finished run ({error!r}): give another --out"
                ) from error

    def get(self, trial: Trial) -> TrialResult | None:
        return self._results.get(trial.key)

    def add(self, trial: Trial, result: TrialResult) -> None:
        self._results[trial.key] = result
        if self._file is not None:
            line = {"key": trial.key, "trial": str(trial), "result": result}
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _parse(fields: dict[str, Any]) -> TrialResult:
    run = fields["run"]
    outcomes = tuple(
        Outcome(**{**outcome, "output_ids": tuple(outcome["output_ids"])})
        for outcome in run["outcomes"]
    )
    return TrialResult(
        run=Run(outcomes, tuple(run["due_s"]), run["seconds"], run.get("lag_s")),
        facts=ServerFacts(**fields["facts"]),
        commit=fields["commit"],
        scheduling_parts_s=fields.get("scheduling_parts_s"),
        moved=fields["moved"],
        tree=fields["tree"],
        evicted_tokens=fields.get("evicted_tokens"),
    )
