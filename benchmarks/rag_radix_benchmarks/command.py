"""The `bench` command of the `rag-radix` console script."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from typing import Any

from rag_radix.errors import RagRadixError

# Each is a module of this package with add_options() and run().
_BENCHMARKS = {
    "ab": "the knowledge tree against stock SGLang, on real servers",
    "reordering": "the waiting queue reordered, against first come, first served",
    "order": "what the order of a prompt's documents does to cache and answers",
    "speculation": "generating while the search still runs, against waiting for it",
}


def add_bench_command(commands: Any, arguments: list[str]) -> None:
    """Add `bench` to an argparse `add_subparsers()` object.

    Only the benchmark that `arguments` name is imported.
    """
    parser = commands.add_parser("bench", help="measure what the parts of rag-radix gain here")
    benchmarks = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for name, summary in _BENCHMARKS.items():
        one = benchmarks.add_parser(
            name, help=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        if arguments[:2] == ["bench", name]:
            module = importlib.import_module(f"rag_radix_benchmarks.{name}")
            one.description = module.__doc__
            module.add_options(one)
            one.set_defaults(run=functools.partial(_run, module))


def _run(module: Any, options: argparse.Namespace) -> int:
    try:
        module.run(options)
    except RagRadixError as error:
        print(f"rag-radix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
