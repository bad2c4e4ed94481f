"""The `profile` command of the `rag-radix` console script."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rag_radix.errors import ConfigError
from rag_radix.exit_status import exit_status

DEFAULT_REPEATS = 5


def add_profile_command(commands: Any) -> None:
    """Add `profile` to an argparse `add_subparsers()` object."""
    parser = commands.add_parser(
        "profile",
        help="measure what a prefill costs, cold and behind device and host hits",
        description="Measures the seconds to prefill new tokens behind cached ones, and writes "
        "them as a file for the policy setting cost_table. EMPTIES THE SERVER'S CACHE: use one "
        "that nobody else uses.",
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--url", help="a running server, such as http://localhost:30000")
    target.add_argument(
        "--model-path",
        metavar="MODEL",
        help="start a server for the time of the measurement; flags after -- are for "
        "`rag-radix serve`",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("profile.json"), metavar="FILE")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="longest prompt (default: the context)"
    )
    parser.add_argument(
        "--repeats", type=int, default=DEFAULT_REPEATS, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and order")
    parser.add_argument("--api-key", metavar="KEY", help="of the server, if it has one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the report as PNG")
    parser.add_argument("--json", action="store_true", help="end with the profile on one line")
    parser.add_argument("server_flags", nargs="*", metavar="-- SERVER FLAGS")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    return exit_status(lambda: _profile(options))


def _profile(options: argparse.Namespace) -> None:
    import orjson
    from tqdm import tqdm

    from rag_radix.launch import serving
    from rag_radix.profile.file import Profile, check_writable
    from rag_radix.profile.grid import build_grid
    from rag_radix.profile.measure import measure
    from rag_radix.profile.plot import check_plotting, save_plot
    from rag_radix.profile.report import format_report
    from rag_radix.profile.server import ProfiledServer

    if options.repeats < 1:
        raise ConfigError(f"--repeats {options.repeats}: give at least 1")
    if options.url and options.server_flags:
        raise ConfigError(
            f"{' '.join(options.server_flags)}: server flags go with --model-path, a server at "
            "--url has its own"
        )
    check_writable("--output", options.output)
    if options.plot is not None:
        check_plotting()
        check_writable("--plot", options.plot)
    with ExitStack() as stack:
        url = options.url
        if url is None:
            print("starting the server ...", file=sys.stderr, flush=True)
            # Costs don't depend on the policy, and with `lru` a prefix that wasn't used for
            # long surely goes to the host.
            flags = ["--radix-eviction-policy", "lru", *options.server_flags]
            url = stack.enter_context(serving(options.model_path, flags))
        server = ProfiledServer(url, options.api_key)
        conditions, capacity = server.describe()
        longest = min(capacity.prompt_tokens, options.max_tokens or capacity.prompt_tokens)
        grid = build_grid(longest, conditions.page_size)
        samples_a_round = len(grid.device_points())
        if capacity.has_host_tier:
            samples_a_round += len(grid.hit_tokens)
        with tqdm(total=samples_a_round * options.repeats, unit="sample") as bar:
            samples = measure(
                server,
                grid,
                capacity,
                repeats=options.repeats,
                seed=options.seed,
                progress=bar.update,
            )
    profile = Profile.of(conditions, grid, samples, repeats=options.repeats, seed=options.seed)
    profile.save(options.output)
    if options.plot is not None:
        save_plot(profile, options.plot)
    print(format_report(profile))
    print(f"\nwritten to {options.output}; use it with")
    print(f'  --radix-eviction-policy-config \'{{"cost_table": "{options.output}"}}\'')
    if options.json:
        print(orjson.dumps(profile.as_json()).decode())
