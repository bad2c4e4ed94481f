"""`rag-radix plan`: how much GPU and host memory a workload is worth."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import orjson

from rag_radix.errors import ConfigError
from rag_radix.policies import DEFAULT_POLICY
from rag_radix.replay.options import (
    add_server_options,
    add_trace_options,
    check_sizes,
    check_variants,
    cost_of,
    parse_variants,
    read_requests,
    reporting,
    size,
    warm_up_of,
)
from rag_radix.replay.runs import PolicyVariant, ReplayServer, replay
from rag_radix.replay.skew import Skew, footprint_tokens, skew_of
from rag_radix.replay.trace import TraceRequest

SKEW_PARTS = (0.03, 0.10, 0.20)
_DEVICE_SIZES = 3
_HOST_SIZES = 4


@dataclass(frozen=True)
class PlanCell:
    """What a server of one size would find.

    Attributes:
        device_tokens: Tokens of the device tier.
        host_tokens: Tokens of the host tier.
        token_hit_rate: Cached document tokens by all tokens of the prompts.
        prompt_hit_rate: Cached tokens, templates included, by the same; what a server reports.
        prefill_s: Modelled prefill and load-back time.
        saved_share: Of the prefill time with only templates cached, the part that is saved.
    """

    device_tokens: int
    host_tokens: int
    token_hit_rate: float
    prompt_hit_rate: float
    prefill_s: float
    saved_share: float


def plan(
    requests: Sequence[TraceRequest],
    variant: PolicyVariant,
    server: ReplayServer,
    device_sizes: Sequence[int],
    host_sizes: Sequence[int],
    *,
    warm_up: int = 0,
    on_request: Callable[[], object] = lambda: None,
) -> list[PlanCell]:
    """Replay `requests` on servers of all the given sizes, in tokens.

    Raises:
        ConfigError: A request is longer than a device tier, or the policy is unknown.
    """
    uncached_s = uncached_prefill_s(requests[warm_up:], server)
    cells = []
    for device_tokens in device_sizes:
        for host_tokens in host_sizes:
            sized = replace(server, device_tokens=device_tokens, host_tokens=host_tokens)
            totals = replay(requests, variant, sized, warm_up=warm_up, on_request=on_request)
            cells.append(
                PlanCell(
                    device_tokens,
                    host_tokens,
                    totals.token_hit_rate,
                    totals.prompt_hit_rate,
                    totals.prefill_s,
                    1 - totals.prefill_s / uncached_s,
                )
            )
    return cells


def uncached_prefill_s(requests: Sequence[TraceRequest], server: ReplayServer) -> float:
    """Prefill seconds when only what precedes the first document is cached."""
    seconds = 0.0
    for request in requests:
        cached = request.documents[0].start if request.documents else 0
        seconds += server.cost(cached, max(request.prompt_tokens - cached, 1))
    return seconds


def knee(cells: Sequence[PlanCell]) -> PlanCell:
    """Where more memory begins to pay less: the size that lies farthest above the straight
    line from nothing to the largest memory and the largest saving of `cells`."""
    most_tokens = max(cell.device_tokens + cell.host_tokens for cell in cells)
    most_saved = max(cell.saved_share for cell in cells) or 1.0

    def above(cell: PlanCell) -> float:
        tokens = cell.device_tokens + cell.host_tokens
        return cell.saved_share / most_saved - tokens / most_tokens

    return max(cells, key=above)


def default_sizes(requests: Sequence[TraceRequest], page_size: int) -> tuple[list[int], list[int]]:
    """Sizes of both tiers in tokens that are worth a look.

    GPU: from twice the longest request in steps of four. Host: none, and from a 64th of what
    all of the trace's documents take at their places up to all of it, in steps of four; those
    once that come to the same.
    """
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    footprint = footprint_tokens(requests)
    device = [2 * longest * 4**step for step in range(_DEVICE_SIZES)]
    host = [footprint // 4**step for step in reversed(range(_HOST_SIZES))]
    return (
        [_rounded(tokens, page_size) for tokens in device],
        sorted({0, *(_rounded(tokens, page_size) for tokens in host if tokens)}),
    )


def _rounded(tokens: int, page_size: int) -> int:
    """Up to two digits, and to a page."""
    unit = 10 ** max(len(str(tokens)) - 2, 0)
    return -(-tokens // unit) * unit // page_size * page_size or page_size


def add_plan_command(subparsers: Any) -> None:
    """Add `plan` to an argparse `add_subparsers()` object."""
    parser = subparsers.add_parser(
        "plan", help="hit rate and saved prefill time by GPU and host memory, from a trace"
    )
    add_trace_options(parser)
    parser.add_argument(
        "--gpu-tokens", metavar="N,...", help="sizes to try (default: from the trace)"
    )
    parser.add_argument(
        "--host-gib", metavar="X,...", help="sizes to try (default: from the trace)"
    )
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="(default: %(default)s)")
    parser.add_argument("--policy-config", metavar="JSON", help="its settings")
    add_server_options(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="charts, e.g. plan.png")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.set_defaults(run=reporting(_run))


def _run(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    from rag_radix.replay.charts import check_plottable, plot_plan

    if options.plot:
        check_plottable(options.plot)
    variants = parse_variants(options.policy, options.policy_config)
    if len(variants) > 1:
        raise ConfigError(f"--policy {options.policy!r}: a plan is for one policy")
    check_variants(variants, options.policy_config)
    requests = read_requests(options)
    warm_up = warm_up_of(options, len(requests))
    server = ReplayServer(
        device_tokens=0,
        host_tokens=0,
        page_size=options.page_size,
        kv_bytes_per_token=options.kv_bytes_per_token,
        cost=cost_of(options),
        queue=options.queue,
        reorder_window=options.reorder_window if options.reorder else 0,
    )
    device_sizes, host_sizes = default_sizes(requests, options.page_size)
    if options.gpu_tokens:
        device_sizes = [int(tokens) for tokens in _numbers(options.gpu_tokens, "--gpu-tokens")]
    if options.host_gib:
        host_sizes = [
            _host_tokens(gib, options.kv_bytes_per_token)
            for gib in _numbers(options.host_gib, "--host-gib")
        ]
    check_sizes(device_sizes, host_sizes, options.page_size)
    total = len(requests) * len(device_sizes) * len(host_sizes)
    with tqdm(total=total, unit=" requests", disable=None) as bar:
        cells = plan(
            requests,
            variants[0],
            server,
            device_sizes,
            host_sizes,
            warm_up=warm_up,
            on_request=bar.update,
        )
    skew = skew_of(requests)
    print(
        f"{options.trace or options.workload}: {len(requests) - warm_up:,} requests after "
        f"{warm_up:,} of warm-up, {variants[0].label}, page {options.page_size}\n"
    )
    print(skew_line(skew))
    print(
        f"All documents at their places take {footprint_tokens(requests):,} tokens, "
        f"{_gib(footprint_tokens(requests), server):,.0f} GiB.\n"
    )
    print(table(cells, server))
    if options.plot:
        plot_plan(cells, knee(cells), skew, server, options.plot)
    if options.json:
        found = {
            "cells": [asdict(cell) for cell in cells],
            "knee": asdict(knee(cells)),
            "skew": {f"{part:g}": skew.share_of_top(part) for part in SKEW_PARTS},
            "footprint_tokens": footprint_tokens(requests),
        }
        print(orjson.dumps(found).decode())


def _numbers(text: str, option: str) -> list[float]:
    try:
        return sorted({size(number) for number in text.split(",")})
    except ValueError:
        raise ConfigError(f"{option} {text!r}: give numbers separated by commas") from None
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{option} {text!r}: each {error}") from None


def _gib(tokens: int, server: ReplayServer) -> float:
    return tokens * server.kv_bytes_per_token / 2**30


def skew_line(skew: Skew) -> str:
    """The skew in words."""
    tops = ", ".join(f"top {part:.0%}: {skew.share_of_top(part):.0%}" for part in SKEW_PARTS)
    return f"Retrievals of the {len(skew.retrievals):,} documents seen: {tops}."


def host_gib(tokens: int, server: ReplayServer) -> str:
    """A host size as `--host-gib` takes it: the shortest number that gives as many tokens."""
    exact = _gib(tokens, server)
    for digits in range(16):
        text = f"{ceil(exact * 10**digits) / 10**digits:.{digits}f}"
        if _host_tokens(float(text), server.kv_bytes_per_token) == tokens:
            break
    return text


def _host_tokens(gib: float, kv_bytes_per_token: int) -> int:
    return int(gib * 2**30 // kv_bytes_per_token)


def table(cells: Sequence[PlanCell], server: ReplayServer) -> str:
    """Hit rates and saved prefill time, GPU sizes down, host sizes across, the knee marked."""
    best = knee(cells)
    host_sizes = sorted({cell.host_tokens for cell in cells})
    device_sizes = sorted({cell.device_tokens for cell in cells})
    by_size = {(cell.device_tokens, cell.host_tokens): cell for cell in cells}
    heads = "".join(f"{host_gib(tokens, server):>16} GiB" for tokens in host_sizes)
    lines = [
        "%: token hit rate of documents / of whole prompts, which a server reports / prefill time "
        "saved",
        f"{'GPU tokens':>14}  host{heads}",
    ]
    for device_tokens in device_sizes:
        line = f"{device_tokens:>14}      "
        for host_tokens in host_sizes:
            cell = by_size[device_tokens, host_tokens]
            mark = "*" if cell is best else ""
            shares = (cell.token_hit_rate, cell.prompt_hit_rate, cell.saved_share)
            line += (mark + " / ".join(f"{100 * share:.1f}" for share in shares)).rjust(20)
        lines.append(line)
    lines.append(
        f"* knee: --gpu-tokens {best.device_tokens} ({_gib(best.device_tokens, server):,.1f} GiB) "
        f"--host-gib {host_gib(best.host_tokens, server)}; beyond it, more memory pays less."
    )
    return "\n".join(lines)
