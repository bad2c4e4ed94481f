"""Command-line options that `simulate` and `plan` share."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import orjson

from rag_radix.cost_model import PrefillCostTable
from rag_radix.errors import ConfigError, RagRadixError
from rag_radix.policies import POLICIES
from rag_radix.replay.reference_cost import KV_BYTES_PER_TOKEN, a10g_mistral_cost_table
from rag_radix.replay.runs import PolicyVariant
from rag_radix.replay.trace import TraceRequest, read_trace
from rag_radix.replay.workloads import WORKLOADS, generate
from rag_radix.settings import DEFAULT_REORDER_WINDOW, parse_settings

DEFAULT_REQUESTS = 20_000
# What is replayed before anything is counted.
WARM_UP_SHARE = 1 / 6


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which requests are replayed."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="a trace of JSON lines")
    source.add_argument(
        "--workload", choices=WORKLOADS, metavar="NAME", help=f"one of {', '.join(WORKLOADS)}"
    )
    parser.add_argument(
        "--requests",
        type=_positive,
        metavar="N",
        help=f"the first N (default: all of a trace, {DEFAULT_REQUESTS:,} of a workload)",
    )
    parser.add_argument(
        "--seed",
        type=_count,
        default=0,
        metavar="S",
        help="of the workload (default: %(default)s)",
    )
    parser.add_argument(
        "--k",
        type=_positive,
        default=2,
        metavar="K",
        help="documents a retrieval of a workload (default: %(default)s)",
    )
    parser.add_argument(
        "--warm-up", type=_count, metavar="N", help="requests not counted (default: a sixth)"
    )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Options that say what server is imagined, but not how much memory it has."""
    parser.add_argument(
        "--kv-bytes-per-token",
        type=_positive,
        default=KV_BYTES_PER_TOKEN,
        metavar="N",
        help="of KV (default: %(default)s, a 7B model in 16 bits with grouped-query attention)",
    )
    parser.add_argument(
        "--page-size",
        type=_positive,
        default=16,
        metavar="P",
        help="of the server, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--queue",
        type=_count,
        default=0,
        metavar="N",
        help="requests that wait while one is served: some policies look there, and --reorder "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--reorder",
        action="store_true",
        help="serve those that wait in the order of reuse, not as they come",
    )
    parser.add_argument(
        "--reorder-window",
        type=_positive,
        default=DEFAULT_REORDER_WINDOW,
        metavar="W",
        help="how many younger requests may be served before one (default: %(default)s)",
    )
    parser.add_argument(
        "--cost-table",
        type=Path,
        metavar="FILE",
        help="a prefill-cost table (default: a 7B model on an A10G, from arithmetic)",
    )


def read_requests(options: argparse.Namespace, seed: int | None = None) -> list[TraceRequest]:
    """The requests that the options ask for; `seed` takes the place of theirs.

    Raises:
        TraceError: The trace can't be read.
        ConfigError: An option is out of range, or the trace is empty.
    """
    if options.trace is None:
        return generate(
            options.workload,
            requests=options.requests or DEFAULT_REQUESTS,
            seed=options.seed if seed is None else seed,
            k=options.k,
        )
    requests = read_trace(options.trace)[: options.requests]
    if not requests:
        raise ConfigError(f"trace {str(options.trace)!r} has no requests")
    return requests


def warm_up_of(options: argparse.Namespace, requests: int) -> int:
    """Requests that aren't counted.

    Raises:
        ConfigError: That would be all of them.
    """
    warm_up = int(requests * WARM_UP_SHARE) if options.warm_up is None else int(options.warm_up)
    if warm_up >= requests:
        raise ConfigError(f"--warm-up {warm_up}: the trace has only {requests} requests")
    return warm_up


def cost_of(options: argparse.Namespace) -> PrefillCostTable:
    """The prefill cost that the options ask for.

    Raises:
        ConfigError: The file can't be used.
    """
    if options.cost_table is None:
        return a10g_mistral_cost_table()
    return PrefillCostTable.load(options.cost_table)


def parse_variants(policies: str, config: str | None) -> list[PolicyVariant]:
    """Policies from a list like `pgdsf,pgdsf:frequency=node`, in its order.

    Settings behind a colon override those of `config`, a JSON object for all of them. A
    value is JSON or, when it isn't, a string.

    Raises:
        ConfigError: An unknown policy, or settings that aren't written so.
    """
    try:
        common = orjson.loads(config) if config else {}
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--policy-config {config!r} isn't JSON: {error}") from error
    if not isinstance(common, dict):
        raise ConfigError(f"--policy-config {config!r} must be a JSON object")
    variants = [_variant(label.strip(), common) for label in policies.split(",") if label.strip()]
    for variant in variants:
        if "trace" in variant.config:
            raise ConfigError(
                f"trace={variant.config['trace']!r}: a replay writes no trace, a server does"
            )
    if not variants:
        raise ConfigError(f"--policy names no policy: use some of {', '.join(sorted(POLICIES))}")
    return variants


def _variant(label: str, common: dict[str, Any]) -> PolicyVariant:
    name, *settings = label.split(":")
    if name not in POLICIES:
        raise ConfigError(
            f"--policy {name!r} doesn't exist: use some of {', '.join(sorted(POLICIES))}"
        )
    config = dict(common)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"--policy {label!r}: write settings like pgdsf:frequency=node, not {setting!r}"
            )
        try:
            config[key] = orjson.loads(value)
        except orjson.JSONDecodeError:
            config[key] = value
    return PolicyVariant(label, name, config)


def check_variants(variants: Iterable[PolicyVariant], config: str | None) -> None:
    """Refuse settings that a policy doesn't take, before SGLang is imported, which takes long.

    Raises:
        ConfigError: It names the option of this command.
    """
    for variant in variants:
        try:
            parse_settings(variant.policy, variant.config, a10g_mistral_cost_table)
        except ConfigError as error:
            options = [f"--policy {variant.label!r}"] if ":" in variant.label else []
            options += ["--policy-config"] if config else []
            message = str(error).replace("--radix-eviction-policy-config", " or ".join(options))
            raise ConfigError(message) from error


@contextmanager
def sglang_muted() -> Iterator[None]:
    """Without SGLang's warnings of missing hardware and small pools: nothing is served here."""
    logger = logging.getLogger("sglang")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"sglang\.")
            yield
    finally:
        logger.setLevel(level)


def reporting(
    command: Callable[[argparse.Namespace], None],
) -> Callable[[argparse.Namespace], int]:
    """A command whose expected errors are one line on stderr and exit status 2."""

    @functools.wraps(command)
    def run(options: argparse.Namespace) -> int:
        try:
            with sglang_muted():
                command(options)
        except RagRadixError as error:
            print(f"rag-radix: {error}", file=sys.stderr)
            return 2
        return 0

    return run


def check_sizes(device: Iterable[int], host: Iterable[int], page_size: int) -> None:
    """Refuse tiers that hold no page.

    Raises:
        ConfigError: It names the option.
    """
    for tokens in device:
        if tokens < page_size:
            raise ConfigError(f"--gpu-tokens {tokens}: give at least a page, {page_size} tokens")
    for tokens in host:
        if 0 < tokens < page_size:
            raise ConfigError(
                f"--host-gib gives {tokens} tokens: give at least a page, {page_size} tokens, or 0"
            )


def size(text: str) -> float:
    """What an option says that may be a fraction: a finite number from 0 on."""
    value = float(text)
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError("must be a number from 0 on")
    return value


def seed_list(text: str) -> list[int]:
    """What an option says that lists several seeds."""
    return [_count(each) for each in text.split(",")]


def _positive(text: str) -> int:
    value = _count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be positive")
    return value


def _count(text: str) -> int:
    value = int(text.replace("_", "").replace(",", ""))
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value
