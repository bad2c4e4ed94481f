"""The `rag-radix` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rag_radix.errors import RagRadixError

# As a shell reports the signal that ends other programs there.
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # `serve` hands its arguments to SGLang's own parser untouched, --help included.
    if arguments[:1] == ["serve"]:
        from rag_radix.serve import serve

        try:
            return serve(arguments[1:])
        except RagRadixError as error:
            print(f"rag-radix: {error}", file=sys.stderr)
            return 2
    from rag_radix_benchmarks.command import add_bench_command
    from rag_radix_frontend.cli import add_index_commands

    from rag_radix.control.commands import add_control_commands
    from rag_radix.profile.command import add_profile_command
    from rag_radix.replay.plan import add_plan_command
    from rag_radix.replay.simulate import add_simulate_command
    from rag_radix.selftest.command import add_selftest_command

    parser = argparse.ArgumentParser(
        prog="rag-radix", description="RAG serving on SGLang that reads a document once."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser(
        "serve",
        help="start SGLang with the knowledge tree; takes all flags of `sglang serve`, and "
        "--restarts N to start it again when it dies",
    )
    add_index_commands(commands)
    add_profile_command(commands)
    add_simulate_command(commands)
    add_plan_command(commands)
    add_bench_command(commands, arguments)
    add_control_commands(commands)
    add_selftest_command(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads it, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return status
