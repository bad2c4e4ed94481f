"""Figures that are done, in a file, so that a measurement goes on after an interruption."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from rag_radix.errors import ConfigError


def open_lines(path: Path) -> tuple[FileIO, list[bytes]]:
    """A file to append lines to, without one that an interruption cut off, and what it holds.

    Raises:
        ConfigError: It can't be written.
    """
    try:
        file = path.open("a+b", buffering=0)
        file.seek(0)
        content = file.read()
    except OSError as error:
        raise ConfigError(f"results can't be kept in {str(path)!r}: {error}") from error
    complete = content[: content.rfind(b"\n") + 1]
    file.truncate(len(complete))
    return file, complete.splitlines()


class KeptFigures:
    """Plain values by what decides them, one JSON line each.

    A line is written as a whole or not at all.

    Args:
        path: File to read and append to; None keeps nothing.
        common: Of the fields of every figure: options, and a digest of the code.

    Raises:
        ConfigError: The file can't be written, or holds something else.
    """

    def __init__(self, path: Path | None, common: Mapping[str, Any]) -> None:
        self._common = common
        self._figures: dict[str, Any] = {}
        self._file: FileIO | None = None
        if path is None:
            return
        with contextlib.suppress(OSError):  # which opening the file says
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file, lines = open_lines(path)
        for number, line in enumerate(lines, 1):
            try:
                fields = orjson.loads(line)
                self._figures[fields["key"]] = fields["figures"]
            except (LookupError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path}:{number} is no finished figure ({error!r}): give another --out"
                ) from error

    def get(self, measure: Callable[[], Any], **fields: Any) -> Any:
        """What was kept of these fields, or else what is measured now.

        Args:
            measure: Gives plain values.
            fields: Beside the common ones, all that decides them; plain values, too.
        """
        content = orjson.dumps({**self._common, **fields}, option=orjson.OPT_SORT_KEYS)
        key = hashlib.blake2b(content, digest_size=8).hexdigest()
        if key not in self._figures:
            figures = measure()
            self._figures[key] = figures
            if self._file is not None:
                line = {"key": key, "of": fields, "figures": figures}
                self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        return self._figures[key]
