"""The manifest of an index directory: what it holds, for which encoder, file by file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from rag_radix_frontend.errors import DamagedIndexError

FORMAT = "rag-radix-index"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_REBUILD = "build it again with `rag-radix index build`"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and SHA-256 of one file, as written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an index directory holds. The metric is always the inner product of unit vectors."""

    encoder: str
    dimensions: int
    kind: str
    documents: int
    files: Mapping[str, FileRecord]


def record_files(directory: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Measure and digest the named files of a directory."""
    return {
        name: FileRecord((directory / name).stat().st_size, _sha256(directory / name))
        for name in names
    }


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json`; the last step of a build."""
    value = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "metric": "inner_product",
        **asdict(manifest),
    }
    (directory / MANIFEST_NAME).write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))


def read_manifest(directory: Path) -> Manifest:
    """Read `manifest.json` and check that each file it lists has the size it had when written.

    Raises:
        DamagedIndexError: says what is missing, foreign, or of another size.
    """
    if not directory.is_dir():
        raise DamagedIndexError(f"{directory} is not a directory; {_REBUILD}")
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise DamagedIndexError(f"{directory} is not an index: it has no {MANIFEST_NAME}")
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DamagedIndexError(f"{path} is not valid JSON ({error}); {_REBUILD}") from None
    manifest = _parse(path, value)
    for name, record in manifest.files.items():
        if not (directory / name).is_file():
            raise DamagedIndexError(f"{directory / name} is missing; {_REBUILD}")
        size_bytes = (directory / name).stat().st_size
        if size_bytes != record.size_bytes:
            raise DamagedIndexError(
                f"{directory / name} has {size_bytes} bytes instead of {record.size_bytes}; "
                f"it was truncated or replaced: {_REBUILD}"
            )
    return manifest


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Compare every file with its digest; reads all of them.

    Raises:
        DamagedIndexError: names the first file that differs.
    """
    for name, record in manifest.files.items():
        if _sha256(directory / name) != record.sha256:
            raise DamagedIndexError(f"{directory / name} was altered after the build; {_REBUILD}")


def _parse(path: Path, value: Any) -> Manifest:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DamagedIndexError(f"{path} is not the manifest of a {FORMAT}")
    if value.get("format_version") != FORMAT_VERSION:
        raise DamagedIndexError(
            f"{path} has format version {value.get('format_version')!r}, this rag-radix reads "
            f"version {FORMAT_VERSION}; {_REBUILD}"
        )
    try:
        return Manifest(
            encoder=str(value["encoder"]),
            dimensions=int(value["dimensions"]),
            kind=str(value["kind"]),
            documents=int(value["documents"]),
            files={
                name: FileRecord(int(record["size_bytes"]), str(record["sha256"]))
                for name, record in value["files"].items()
            },
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedIndexError(
            f"{path} lacks a field or holds a wrong one ({error!r}); {_REBUILD}"
        ) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
