"""`rag-radix simulate`: policies side by side on one workload, next to the clairvoyant bound."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from rag_radix.errors import ConfigError
from rag_radix.replay.bound import Bound, clairvoyant_bound
from rag_radix.replay.options import (
    add_server_options,
    add_trace_options,
    check_sizes,
    check_variants,
    cost_of,
    parse_variants,
    read_requests,
    reporting,
    seed_list,
    size,
    warm_up_of,
)
from rag_radix.replay.runs import PolicyVariant, ReplayServer, ReplayTotals, replay
from rag_radix.replay.trace import TraceRequest

BASELINE = PolicyVariant("lru", "lru")


@dataclass(frozen=True)
class PolicyResult:
    """How a policy did on one trace.

    Attributes:
        token_hit_rate: Cached document tokens by all tokens of the prompts.
        hit_rate_vs_lru: The same by that of `lru`.
        document_hit_rate: Documents found as a whole by all documents.
        prefill_s: Modelled prefill and load-back time of all counted requests.
        prefill_time_vs_lru: The same by that of `lru`.
        bound_share: `(T_nocache - T) / (T_nocache - T_bound)`: of the time that a clairvoyant
            cache could save against one of templates only, the part that this one saves.
        bound_hit_rate: Highest `token_hit_rate` that any cache could have. This bound and that
            on time are those of the order in which requests arrive; reordered ones may exceed
            them.
        d2h_bytes: Copied from device to host for all counted requests.
        h2d_bytes: Loaded back from host, likewise.
        ms_per_request: CPU time of the replay for a request, the tree's and its own.
    """

    token_hit_rate: float
    hit_rate_vs_lru: float
    document_hit_rate: float
    prefill_s: float
    prefill_time_vs_lru: float
    bound_share: float
    bound_hit_rate: float
    d2h_bytes: float
    h2d_bytes: float
    ms_per_request: float


def simulate(
    requests: Sequence[TraceRequest],
    variants: Sequence[PolicyVariant],
    server: ReplayServer,
    *,
    warm_up: int = 0,
    on_request: Callable[[], object] = lambda: None,
) -> dict[str, PolicyResult]:
    """Replay `requests` under `lru` and each of `variants`; results by label.

    Raises:
        ConfigError: An unknown policy or setting, or a request longer than the device tier.
    """
    bound = clairvoyant_bound(
        requests,
        device_tokens=server.device_tokens,
        host_tokens=server.host_tokens,
        cost=server.cost,
        load_s_per_token=server.load_s_per_token,
        warm_up=warm_up,
    )
    totals = {
        variant.label: replay(requests, variant, server, warm_up=warm_up, on_request=on_request)
        for variant in with_baseline(variants)
    }
    baseline = totals[BASELINE.label]
    return {label: _result(each, baseline, bound) for label, each in totals.items()}


def with_baseline(variants: Sequence[PolicyVariant]) -> list[PolicyVariant]:
    """`lru`, and what else is in `variants`."""
    return [BASELINE, *(each for each in variants if each.label != BASELINE.label)]


def _result(totals: ReplayTotals, baseline: ReplayTotals, bound: Bound) -> PolicyResult:
    return PolicyResult(
        token_hit_rate=totals.token_hit_rate,
        hit_rate_vs_lru=_ratio(totals.token_hit_rate, baseline.token_hit_rate),
        document_hit_rate=_ratio(totals.hit_documents, totals.documents),
        prefill_s=totals.prefill_s,
        prefill_time_vs_lru=_ratio(totals.prefill_s, baseline.prefill_s),
        bound_share=_ratio(bound.uncached_s - totals.prefill_s, bound.saved_s),
        bound_hit_rate=bound.hit_rate,
        d2h_bytes=totals.d2h_bytes,
        h2d_bytes=totals.h2d_bytes,
        ms_per_request=1e3 * totals.replay_s / totals.requests,
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def mean_and_spread(
    runs: Sequence[dict[str, PolicyResult]],
) -> tuple[dict[str, PolicyResult], dict[str, PolicyResult]]:
    """By label, the mean of several seeds' results, and the largest less the smallest."""
    means, spreads = {}, {}
    for label in runs[0]:
        values = {
            field.name: [getattr(run[label], field.name) for run in runs]
            for field in fields(PolicyResult)
        }
        means[label] = PolicyResult(**{name: fmean(each) for name, each in values.items()})
        spreads[label] = PolicyResult(
            **{name: max(each) - min(each) for name, each in values.items()}
        )
    return means, spreads


def add_simulate_command(subparsers: Any) -> None:
    """Add `simulate` to an argparse `add_subparsers()` object."""
    parser = subparsers.add_parser(
        "simulate", help="replay a trace under several policies, without a model"
    )
    add_trace_options(parser)
    parser.add_argument(
        "--seeds", type=seed_list, metavar="S,...", help="several seeds: mean and spread"
    )
    parser.add_argument("--gpu-tokens", type=int, required=True, metavar="N")
    parser.add_argument("--host-gib", type=size, default=0.0, metavar="X", help="(default: none)")
    parser.add_argument(
        "--policy",
        default="pgdsf",
        metavar="A,B,...",
        help="policies, with settings like pgdsf:frequency=node; lru always runs as well "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--policy-config",
        metavar="JSON",
        help="settings of all but the lru that they are compared with",
    )
    add_server_options(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a chart, e.g. policies.png")
    parser.add_argument(
        "--json", action="store_true", help="one object on the last line, by policy"
    )
    parser.set_defaults(run=reporting(_run))


def _run(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    from rag_radix.replay.charts import check_plottable, plot_policies

    if options.plot:
        check_plottable(options.plot)
    variants = parse_variants(options.policy, options.policy_config)
    check_variants(with_baseline(variants), options.policy_config)
    server = ReplayServer(
        device_tokens=options.gpu_tokens,
        host_tokens=int(options.host_gib * 2**30) // options.kv_bytes_per_token,
        page_size=options.page_size,
        kv_bytes_per_token=options.kv_bytes_per_token,
        cost=cost_of(options),
        queue=options.queue,
        reorder_window=options.reorder_window if options.reorder else 0,
    )
    check_sizes([server.device_tokens], [server.host_tokens], server.page_size)
    if options.seeds and not options.workload:
        given = ",".join(map(str, options.seeds))
        raise ConfigError(f"--seeds {given}: a --trace has no seed")
    seeds = options.seeds or [options.seed]
    runs = []
    for seed in seeds:
        requests = read_requests(options, seed)
        warm_up = warm_up_of(options, len(requests))
        total = len(requests) * len(with_baseline(variants))
        with tqdm(total=total, unit=" requests", desc=f"seed {seed}", disable=None) as bar:
            runs.append(
                simulate(requests, variants, server, warm_up=warm_up, on_request=bar.update)
            )
    means, spreads = mean_and_spread(runs)
    print(_title(options, server, seeds, len(requests), warm_up))
    print(table(means, spreads if len(seeds) > 1 else None, len(requests) - warm_up))
    if server.reorder_window or any(each.config.get("reorder_window") for each in variants):
        print(
            "The bound is that of the order in which requests arrive. To what is reordered it is "
            "no limit."
        )
    if options.plot:
        plot_policies(means, options.plot)
    if options.json:
        found = {label: asdict(result) for label, result in means.items()}
        if len(seeds) > 1:
            for label, spread in spreads.items():
                found[label]["spread"] = asdict(spread)
        print(orjson.dumps(found).decode())


def _title(
    options: argparse.Namespace, server: ReplayServer, seeds: list[int], requests: int, warm_up: int
) -> str:
    source = str(options.trace or f"{options.workload}, k = {options.k}")
    if options.workload:
        source += f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    queue = f", {server.queue} in the queue" if server.queue else ""
    if server.reorder_window:
        queue += f", reordered within a window of {server.reorder_window}"
    return (
        f"{source}: {requests - warm_up:,} requests after {warm_up:,} of warm-up, device "
        f"{server.device_tokens:,} tokens, host {server.host_tokens:,} tokens "
        f"({options.host_gib:g} GiB), page {server.page_size}{queue}"
    )


def table(
    results: dict[str, PolicyResult], spreads: dict[str, PolicyResult] | None, requests: int
) -> str:
    """Results as an aligned table, the quantities of `PolicyResult`; with `spreads`, those of
    several seeds, they are means, and hit rate and bound share come with half of theirs."""
    width = max(len("policy"), *map(len, results)) + 2
    lines = [
        f"{'policy':<{width}}{'token hit rate':>16}{'x lru':>7}{'documents':>11}"
        f"{'prefill':>11}{'x lru':>7}{'of bound':>13}{'to host':>14}{'from host':>14}{'replay':>9}"
    ]
    for label, each in results.items():
        hit_rate, share = f"{100 * each.token_hit_rate:.2f}", f"{each.bound_share:.3f}"
        if spreads:
            hit_rate += f" ±{50 * spreads[label].token_hit_rate:.2f}"
            share += f" ±{spreads[label].bound_share / 2:.3f}"
        lines.append(
            f"{label:<{width}}"
            f"{hit_rate:>15}%"
            f"{each.hit_rate_vs_lru:>7.2f}"
            f"{100 * each.document_hit_rate:>10.2f}%"
            f"{each.prefill_s:>9,.1f} s"
            f"{each.prefill_time_vs_lru:>7.3f}"
            f"{share:>13}"
            f"{each.d2h_bytes / 2**30:>10,.2f} GiB"
            f"{each.h2d_bytes / 2**30:>10,.2f} GiB"
            f"{each.ms_per_request:>6.2f} ms"
        )
    bound = next(iter(results.values())).bound_hit_rate
    lines.append(f"{'bound':<{width}}{100 * bound:>15.2f}%{'':>44}1.000")
    lines.append(
        f"Prefill time and bytes are sums over {requests:,} requests, replay is CPU time a "
        "request. Of bound: of the\nprefill time that a clairvoyant cache could save, "
        "(T_nocache - T) / (T_nocache - T_bound)."
    )
    return "\n".join(lines)
