"""The `index` commands of the `rag-radix` console script."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rag_radix_frontend.build import build_index
from rag_radix_frontend.encoders import MINILM
from rag_radix_frontend.errors import FrontendError
from rag_radix_frontend.index import KINDS
from rag_radix_frontend.manifest import Manifest, read_manifest, verify_files


def add_index_commands(subparsers: Any) -> None:
    """Add `index build` and `index info` to an argparse `add_subparsers()` object.

    Each sets `run`, a function of the parsed arguments that returns the exit status.
    """
    index = subparsers.add_parser("index", help="build and inspect document indexes")
    commands = index.add_subparsers(dest="index_command", required=True)

    build = commands.add_parser("build", help="build an index from a file of JSON lines")
    build.add_argument(
        "source",
        type=Path,
        help='one document a line: {"id": "...", "text": "..."}, optionally '
        '"version" and "metadata"',
    )
    build.add_argument("--out", type=Path, required=True, metavar="DIR")
    build.add_argument(
        "--encoder", default=MINILM, help="minilm (default) or sentence-transformers:NAME"
    )
    build.add_argument("--kind", choices=KINDS, default="flat", help="flat (default) is exact")
    build.add_argument("--overwrite", action="store_true", help="replace DIR if it exists")
    build.set_defaults(run=_reporting(_build))

    info = commands.add_parser("info", help="say what an index holds")
    info.add_argument("directory", type=Path, metavar="DIR")
    info.add_argument("--verify", action="store_true", help="compare every file with its digest")
    info.set_defaults(run=_reporting(_info))


def _build(arguments: argparse.Namespace) -> None:
    manifest = build_index(
        arguments.source,
        arguments.out,
        arguments.encoder,
        arguments.kind,
        overwrite=arguments.overwrite,
        progress=True,
    )
    _show(arguments.out, manifest)


def _info(arguments: argparse.Namespace) -> None:
    manifest = read_manifest(arguments.directory)
    if arguments.verify:
        verify_files(arguments.directory, manifest)
    _show(arguments.directory, manifest)


def _show(directory: Path, manifest: Manifest) -> None:
    size_mb = sum(record.size_bytes for record in manifest.files.values()) / 1e6
    print(
        f"{directory}: {manifest.documents:,} documents, {manifest.kind} index, encoder "
        f"{manifest.encoder} ({manifest.dimensions} dimensions), {size_mb:,.1f} MB"
    )


def _reporting(
    command: Callable[[argparse.Namespace], None],
) -> Callable[[argparse.Namespace], int]:
    """A command whose expected errors are one line on stderr and exit status 1."""

    @functools.wraps(command)
    def run(arguments: argparse.Namespace) -> int:
        try:
            command(arguments)
        except FrontendError as error:
            print(f"rag-radix index: {error}", file=sys.stderr)
            return 1
        return 0

    return run
