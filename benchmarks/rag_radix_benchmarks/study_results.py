"""What a study has measured, one JSON file for each step and version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_radix.errors import ConfigError
from rag_radix_benchmarks.study_file import Part, Step


@dataclass(frozen=True)
class Measured:
    """A step's report.

    Attributes:
        step: The step.
        report: Of its benchmark.
        quick: Whether it is of the quick version.
    """

    step: Step
    report: Mapping[str, Any]
    quick: bool


class Results:
    """Reports in a folder.

    Args:
        folder: Made when something is put into it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, part: Part, step: Step, quick: bool, report: Mapping[str, Any]) -> None:
        """Keep a report; an earlier one of the same step and version is replaced."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(part, step, quick)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        partial.rename(path)

    def of(self, part: Part) -> list[Measured]:
        """The steps that were measured, in the full version where there is one.

        Raises:
            ConfigError: A file can't be read.
        """
        found = []
        for step in part.steps:
            for quick in (False, True):
                path = self._path(part, step, quick)
                if path.exists():
                    found.append(Measured(step, _read(path), quick))
                    break
        return found

    def _path(self, part: Part, step: Step, quick: bool) -> Path:
        return self._folder / f"{part.name}-{step.name}{'.quick' if quick else ''}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no result of a study: {error}") from error
    return report
