"""The `bench` command of the `rag-radix` console script."""

from __future__ import annotations

import argparse
import functools
import importlib
from typing import Any

from rag_radix.exit_status import exit_status

# Each is a module of this package with add_options() and run().
_BENCHMARKS = {
    "ab": "the knowledge tree against stock SGLang, on real servers",
    "study": "all parts of a study with `ab` and the others, and one report of them",
    "host-memory": "hit rates over host memory, policy by policy, in replays",
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
            module = benchmark(name)
            one.description = module.__doc__
            module.add_options(one)
            one.set_defaults(run=functools.partial(_run, module))


def benchmark(name: str) -> Any:
    """The module of a benchmark: `add_options()`, `measure()` and `run()`, which prints."""
    return importlib.import_module(f"rag_radix_benchmarks.{name.replace('-', '_')}")


def _run(module: Any, options: argparse.Namespace) -> int:
    return exit_status(lambda: module.run(options))
