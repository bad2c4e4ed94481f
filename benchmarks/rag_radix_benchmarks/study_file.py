"""A study as a file: its parts, and of each part the benchmarks that answer its question.

Sizes, loads and seeds stand in the file, so that they are fixed before anything is measured. A
step is a `rag-radix bench` command; anyone can run it without the study.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rag_radix.errors import ConfigError

# Options of which a benchmark takes one.
INSTEAD_OF = {
    **dict.fromkeys(("--rates", "--concurrency"), "--loads"),
    **dict.fromkeys(("--trace", "--corpus"), "--workload"),
}

STUDIES = files("rag_radix_benchmarks") / "studies"


@dataclass(frozen=True)
class Step:
    """One benchmark of a part.

    Attributes:
        name: Of its files.
        label: In tables and charts.
        bench: Which benchmark of `rag-radix bench`.
        options: Of the full study.
        quick: Further ones of its quick version, which win; None where that leaves the step out.
        minutes: Full and quick, where they can't be estimated from the options.
    """

    name: str
    label: str
    bench: str
    options: tuple[str, ...]
    quick: tuple[str, ...] | None
    minutes: tuple[float, float] | None

    def arguments(self, quick: bool, more: Sequence[str] = ()) -> list[str]:
        """The options of a version and more of them, the last of each."""
        return last_of_each([*self.options, *(self.quick or () if quick else ()), *more])


@dataclass(frozen=True)
class Part:
    """One question.

    Attributes:
        name: On the command line.
        title: Of its section.
        question: What it asks, a sentence.
        paper: What the RAGCache paper reports on it.
        steps: Measured one after the other.
        server_flags: Of all servers.
        asks_for: What the overview shows of its comparisons: "ttft" or "scheduling".
        ladder: Arms of which each has all of the one before it and something more, so that the
            ratio of two neighbours is what that gains.
        reason: Why its figures came out as they did, Markdown, written after measuring.
    """

    name: str
    title: str
    question: str
    paper: str
    steps: tuple[Step, ...]
    server_flags: tuple[str, ...]
    asks_for: str = "ttft"
    ladder: tuple[str, ...] = ()
    reason: str | None = None

    def steps_of(self, quick: bool) -> tuple[Step, ...]:
        """Those that a version has."""
        return tuple(step for step in self.steps if not quick or step.quick is not None)


@dataclass(frozen=True)
class Machine:
    """What the file takes a machine to do, for estimates of time alone.

    Attributes:
        prompt_tokens_per_s: Tokens of prompts, cached ones included, that a busy server takes.
        server_start_s: From the start of a server to its first answer.
    """

    prompt_tokens_per_s: float
    server_start_s: float


@dataclass(frozen=True)
class Study:
    """All parts, by name.

    Attributes:
        name: Of its file.
        title: Of its report.
        conditions: What of them differs from the paper's.
        machine: For estimates.
        parts: In the order of the report.
    """

    name: str
    title: str
    conditions: str
    machine: Machine
    parts: dict[str, Part]

    def part(self, name: str) -> Part:
        """One part.

        Raises:
            ConfigError: There is none of this name.
        """
        if name not in self.parts:
            raise ConfigError(
                f"--part {name!r}: the study {self.name!r} has {', '.join(self.parts)}"
            )
        return self.parts[name]


def last_of_each(arguments: Sequence[str]) -> list[str]:
    """Command-line options without those that later ones replace; what follows a `--` stays."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    kept = by_option(arguments[:end])
    return [each for words in kept.values() for each in words] + list(arguments[end:])


def by_option(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The last of each option with its values, under its name or that of one it excludes."""
    kept: dict[str, list[str]] = {}
    words: list[str] = []
    for each in arguments:
        if each.startswith("--"):
            key = INSTEAD_OF.get(each, each)
            kept.pop(key, None)
            words = kept[key] = [each]
        else:
            words.append(each)
    return kept


def read_study(name: str) -> Study:
    """A study by the name of one that comes with the package, or from a file.

    Raises:
        ConfigError: There is none, or something in it is missing or unknown.
    """
    path = Path(name) if name.endswith(".toml") else STUDIES / f"{name}.toml"
    try:
        content = tomllib.loads(path.read_text())
    except OSError:
        known = sorted(each.name.removesuffix(".toml") for each in STUDIES.iterdir())
        raise ConfigError(
            f"--study {name!r} doesn't exist: give a .toml file, or one of {', '.join(known)}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--study {name!r}: {error}") from error
    try:
        return _study(Path(name).stem, content)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--study {name!r}: {error!r}") from error


def _study(name: str, content: dict[str, Any]) -> Study:
    common = tuple(shlex.split(content["common"]))
    common_quick = tuple(shlex.split(content["common_quick"]))
    parts = [_part(each, common, common_quick) for each in content["part"]]
    return Study(
        name=name,
        title=content["title"],
        conditions=content["conditions"].strip(),
        machine=Machine(**content["machine"]),
        parts={each.name: each for each in parts},
    )


def _part(fields: dict[str, Any], common: tuple[str, ...], common_quick: tuple[str, ...]) -> Part:
    options = tuple(shlex.split(fields.pop("options", "")))
    flags = tuple(shlex.split(fields.pop("server_flags", "")))
    steps = [_step(each, options, common, common_quick) for each in fields.pop("step")]
    ladder = tuple(fields.pop("ladder", ()))
    return Part(**fields, steps=tuple(steps), server_flags=flags, ladder=ladder)


def _step(
    fields: dict[str, Any],
    of_part: tuple[str, ...],
    common: tuple[str, ...],
    common_quick: tuple[str, ...],
) -> Step:
    bench = fields.pop("bench", "ab")
    # Common options are those of `bench ab`; the other benchmarks have their own.
    before, before_quick = (common, common_quick) if bench == "ab" else ((), ())
    options = before + of_part + tuple(shlex.split(fields.pop("options", "")))
    quick: tuple[str, ...] | None = None
    if fields.get("quick") is not False:
        quick = before_quick + tuple(shlex.split(fields.get("quick", "")))
    fields.pop("quick", None)
    minutes = fields.pop("minutes", None)
    return Step(
        **fields,
        bench=bench,
        options=options,
        quick=quick,
        minutes=None if minutes is None else (minutes[0], minutes[1]),
    )
