"""The `selftest` command of the `rag-radix` console script."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rag_radix.exit_status import exit_status

if TYPE_CHECKING:
    from rag_radix.selftest.comparison import Round

# 16-bit numbers keep 8 or 11 bits, and a cached prefix changes the order of additions:
# log-probabilities move by up to 0.25, so two within twice that may swap.
MARGIN = 0.5


def add_selftest_command(commands: Any) -> None:
    """Add `selftest` to an argparse `add_subparsers()` object."""
    parser = commands.add_parser(
        "selftest",
        help="whether a running server's cached answers are those of a cold one",
        description="Asks a running server the same prompts cold, behind cached documents, many at "
        "once over shared documents, and loaded back from host, and compares the greedy answers "
        "token by token. Ends with 0 if all are equal, 1 if one differs, 2 if it couldn't ask. "
        "Best on a server that nobody else uses; what it computes stays in the cache, under "
        "names of its own.",
    )
    parser.add_argument("--url", required=True, help="such as http://localhost:30000")
    parser.add_argument("--api-key", metavar="KEY", help="of the server, if it has one")
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument(
        "--margin",
        type=float,
        metavar="X",
        help="a token may differ where the cold answer's two best log-probabilities are closer "
        f"than this (default: 0 in float32, else {MARGIN})",
    )
    parser.add_argument(
        "--fill-seconds",
        type=float,
        default=300,
        metavar="S",
        help="for how long at most prompts are computed that fill the device tier and so push "
        "documents out to host (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="end with the result on one line")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    passed = [False]

    def command() -> None:
        passed[0] = _selftest(options)

    return exit_status(command) or (0 if passed[0] else 1)


def _selftest(options: argparse.Namespace) -> bool:
    from rag_radix.profile.server import ProfileError
    from rag_radix.selftest.prompts import make_prompts
    from rag_radix.selftest.rounds import run_rounds
    from rag_radix.selftest.server import OUTPUT_TOKENS, TestedServer

    server = TestedServer(options.url, options.api_key)
    conditions, capacity = server.describe()
    is_exact = conditions.dtype == "float32" and conditions.quantization is None
    margin = options.margin if options.margin is not None else (0.0 if is_exact else MARGIN)
    print(
        f"{conditions.model} on {conditions.device}: SGLang {conditions.sglang_version}, "
        f"{conditions.attention_backend}, {conditions.dtype}, page {conditions.page_size}, "
        f"tp {conditions.tp_size}; margin {margin:g}",
        file=sys.stderr,
    )
    text = server.text()
    prompts = make_prompts(
        text,
        options.prompts,
        page_tokens=conditions.page_size,
        limit_tokens=min(capacity.prompt_tokens, capacity.device_tokens // 4) - OUTPUT_TOKENS,
        seed=options.seed,
    )
    rounds = run_rounds(
        server,
        prompts,
        margin=margin,
        device_tokens=capacity.device_tokens,
        prompt_tokens=capacity.prompt_tokens - 1,
        has_host_tier=capacity.has_host_tier,
        vocabulary=sorted(set(text)),
        fill_limit_s=options.fill_seconds,
        on_round=lambda round_: print(_line(round_), file=sys.stderr, flush=True),
        on_fill=lambda fill_s: print(
            f"filling the device tier of {capacity.device_tokens:,} tokens takes {fill_s:.0f} s …",
            file=sys.stderr,
            flush=True,
        ),
    )
    if not any(round_.device_tokens for round_ in rounds):
        raise ProfileError(
            f"{options.url} found nothing in its cache, so there is nothing to compare: is it "
            "started with --disable-radix-cache?"
        )
    differences = [f"{r.name}: {text}" for r in rounds for text in r.differences]
    verdict = (
        f"No. {len(differences)} answers differ; the first, {differences[0]}"
        if differences
        else "Yes: every answer is that of a cold cache."
    )
    if options.json:
        report = {
            "passed": not differences,
            "margin": margin,
            "conditions": asdict(conditions),
            "rounds": [asdict(round_) for round_ in rounds],
        }
        print(json.dumps(report))
    else:
        print(verdict)
    return not differences


def _line(round_: Round) -> str:
    if round_.skipped:
        return f"{round_.name:<26} not tested: {round_.skipped}"
    return (
        f"{round_.name:<26} {round_.equal:>4} equal, {round_.close} within the margin, "
        f"{len(round_.differences)} different; "
        f"{round_.device_tokens:,} tokens from the device, {round_.host_tokens:,} from host"
    )
