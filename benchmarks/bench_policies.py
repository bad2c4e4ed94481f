"""What replacement policies gain, on replays of the real tree: the claims of the README.

    python benchmarks/bench_policies.py claims      policies against the clairvoyant bound
    python benchmarks/bench_policies.py paper       hit rates over host memory, as in the paper
    python benchmarks/bench_policies.py depth       `max_depth` with five documents a prompt
    python benchmarks/bench_policies.py memory --requests 10000 --warm-up 2000
                                                    hits with a fifth of the memory, by those with
                                                    all that the trace's documents take

Every number is a mean over seeds with its range. A run that was interrupted goes on where it
stopped: finished replays are kept in `--results`, one JSON line each, and count as long as the
code is what they ran on. The policies were tuned on other seeds (101 to 103) than the default
ones.

The bound is that of the order in which requests arrive. Where they are reordered it is only what
to compare with: no cache beats it in that order, but another order may have more to find.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from rag_radix.replay.trace import TraceRequest

GIB = 1 << 30
DEVICE_TOKENS = 50_000
HOST_GIB = 64
DYNAMIC = ("drift", "burst", "drift-burst")
PLUS_QUEUE = "pgdsf-plus, 128 waiting"
PLUS_REORDERED = "pgdsf-plus, 128 reordered"
QUEUE = 128
# Few enough to be retrieved often: of documents retrieved once, no memory has hits.
MEMORY_DOCUMENTS = 1_000
MEMORY_SHARES = (0.2, 1.0)
POLICIES = {
    "lru": ("lru", {}),
    "lfu": ("lfu", {}),
    "gdsf": ("gdsf", {}),
    "pgdsf": ("pgdsf", {}),
    "pgdsf, node": ("pgdsf", {"frequency": "node"}),
    "pgdsf-plus": ("pgdsf-plus", {}),
    PLUS_QUEUE: ("pgdsf-plus", {}),
    PLUS_REORDERED: ("pgdsf-plus", {}),
}


@dataclass(frozen=True)
class Replay:
    """One policy over one seed of one workload.

    Attributes:
        memory_share: Both tiers together have this part of what would hold the trace's documents
            at all their places, in place of `DEVICE_TOKENS` and `host_gib`.
    """

    workload: str
    label: str
    seed: int
    requests: int
    warm_up: int
    host_gib: int = HOST_GIB
    k: int = 2
    max_depth: int | None = None
    page_size: int = 1
    documents: int = 300_000
    memory_share: float | None = None

    @property
    def key(self) -> str:
        """Names the replay together with the code that it runs on."""
        content = orjson.dumps([asdict(self), code_digest()])
        return hashlib.blake2b(content, digest_size=8).hexdigest()


@cache
def code_digest() -> str:
    """Digest of all that a result may depend on: SGLang's version, rag_radix and this file."""
    (package,) = find_spec("rag_radix").submodule_search_locations  # type: ignore[union-attr, misc]
    digest = hashlib.blake2b(version("sglang").encode(), digest_size=8)
    for path in (*sorted(Path(package).rglob("*.py")), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(it: Replay) -> dict[str, float]:
    """Replay and bound; sums over the counted requests."""
    from rag_radix.replay.bound import clairvoyant_bound
    from rag_radix.replay.reference_cost import KV_BYTES_PER_TOKEN
    from rag_radix.replay.runs import PolicyVariant, ReplayServer, replay
    from rag_radix.replay.workloads import generate
    from rag_radix.settings import DEFAULT_REORDER_WINDOW

    requests = generate(
        it.workload, requests=it.requests, seed=it.seed, k=it.k, documents=it.documents
    )
    device_tokens, host_tokens = DEVICE_TOKENS, it.host_gib * GIB // KV_BYTES_PER_TOKEN
    if it.memory_share is not None:
        device_tokens, host_tokens = tiers_with(requests, it.memory_share)
    server = ReplayServer(
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        page_size=it.page_size,
        queue=QUEUE if it.label in (PLUS_QUEUE, PLUS_REORDERED) else 0,
        reorder_window=DEFAULT_REORDER_WINDOW if it.label == PLUS_REORDERED else 0,
    )
    policy, config = POLICIES[it.label]
    if it.max_depth is not None:
        config = {**config, "max_depth": it.max_depth}
    totals = replay(requests, PolicyVariant(it.label, policy, config), server, warm_up=it.warm_up)
    bound = clairvoyant_bound(
        requests,
        device_tokens=server.device_tokens,
        host_tokens=server.host_tokens,
        cost=server.cost,
        load_s_per_token=server.load_s_per_token,
        warm_up=it.warm_up,
    )
    assert server.reorder_window or totals.document_hit_tokens <= bound.hit_tokens
    return {
        "host_gib": server.host_tokens * KV_BYTES_PER_TOKEN / GIB,
        "hit_rate": totals.token_hit_rate,
        "bound_hit_rate": bound.hit_rate,
        "saved_s": bound.uncached_s - totals.prefill_s,
        "bound_saved_s": bound.saved_s,
        "prefill_s": totals.prefill_s,
        "d2h_bytes": totals.d2h_bytes / totals.requests,
        "h2d_bytes": totals.h2d_bytes / totals.requests,
        "cpu_ms": 1e3 * totals.replay_s / totals.requests,
    }


def tiers_with(requests: Sequence[TraceRequest], share: float) -> tuple[int, int]:
    """Tokens of device and host tier that together are `share` of what holds everything.

    The device tier has a tenth of them, or as much as the longest request needs.
    """
    from rag_radix.replay.skew import footprint_tokens

    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    # Questions and outputs pass through, too.
    memory = int(share * (footprint_tokens(requests) + 2 * longest))
    device = min(max(memory // 10, 2 * longest), memory)
    return device, memory - device


def claims(seeds: Iterable[int], requests: int, warm_up: int) -> Iterator[Replay]:
    for seed in seeds:
        for workload in ("mmlu-like", "mmlu-hot", *DYNAMIC):
            for label in (
                "lru",
                "pgdsf",
                "pgdsf, node",
                "pgdsf-plus",
                PLUS_QUEUE,
                PLUS_REORDERED,
            ):
                yield Replay(workload, label, seed, requests, warm_up)


def paper(seeds: Iterable[int], requests: int, warm_up: int) -> Iterator[Replay]:
    for seed in seeds:
        for gib in (8, 16, 32, 64, 128):
            for label in ("lru", "lfu", "gdsf", "pgdsf", "pgdsf-plus"):
                yield Replay("mmlu-like", label, seed, requests, warm_up, host_gib=gib)


def depth(seeds: Iterable[int], requests: int, warm_up: int) -> Iterator[Replay]:
    for seed in seeds:
        for label in ("pgdsf", "pgdsf-plus"):
            for max_depth in (None, 1, 2, 3, 4):
                yield Replay("mmlu-like", label, seed, requests, warm_up, k=5, max_depth=max_depth)


def memory(seeds: Iterable[int], requests: int, warm_up: int) -> Iterator[Replay]:
    for seed in seeds:
        for k in (1, 2):
            for label in ("pgdsf", "pgdsf-plus"):
                for share in MEMORY_SHARES:
                    yield Replay(
                        "nq-like",
                        label,
                        seed,
                        requests,
                        warm_up,
                        k=k,
                        documents=MEMORY_DOCUMENTS,
                        memory_share=share,
                    )


PARTS = {"claims": claims, "paper": paper, "depth": depth, "memory": memory}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--requests", type=int, default=120_000)
    parser.add_argument("--warm-up", type=int, default=20_000)
    parser.add_argument(
        "--page-size",
        type=int,
        default=1,
        help="of the server (default: SGLang's, %(default)s)",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("bench_policies.jsonl"))
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    options = parser.parse_args(arguments)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    replays = [
        replace(it, page_size=options.page_size)
        for it in PARTS[options.part](seeds, options.requests, options.warm_up)
    ]
    done = _finished(options.results)
    missing = [it for it in replays if it.key not in done]
    with options.results.open("ab", buffering=0) as results:
        for number, (it, result) in enumerate(replayed(missing, options.processes), 1):
            done[it.key] = result
            line = {"key": it.key, "replay": asdict(it), "result": result}
            results.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            print(f"{number}/{len(missing)} {it.workload} {it.label}", file=sys.stderr)
    rows = summarise(replays, done)
    print(table(rows))
    if options.json:
        print(orjson.dumps(rows).decode())
    return 0


def replayed(
    replays: Iterable[Replay], processes: int
) -> Iterator[tuple[Replay, dict[str, float]]]:
    """Run `replays` side by side; each as soon as it has ended, with its result."""
    with ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(run, it): it for it in replays}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _finished(path: Path) -> dict[str, dict[str, float]]:
    if not path.exists():
        return {}
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return {line["key"]: line["result"] for line in lines}


def summarise(
    replays: Iterable[Replay], done: dict[str, dict[str, float]]
) -> list[dict[str, float | str]]:
    """Means and ranges over the seeds; ratios to `lru` and to all of the memory where these were
    replayed as well."""
    groups: dict[Replay, list[dict[str, float]]] = {}
    for it in replays:
        groups.setdefault(replace(it, seed=0), []).append(done[it.key])
    rows: list[dict[str, float | str]] = []
    for it, results in groups.items():
        shares = [result["saved_s"] / result["bound_saved_s"] for result in results]
        policy = it.label + (f", max_depth {it.max_depth}" if it.max_depth else "")
        if it.memory_share is not None:
            policy += f", {it.memory_share:.0%}"
        row: dict[str, float | str] = {
            "workload": f"{it.workload}, k = {it.k}",
            "host_gib": fmean(result["host_gib"] for result in results),
            "policy": policy,
            "hit_rate": fmean(result["hit_rate"] for result in results),
            "bound_hit_rate": fmean(result["bound_hit_rate"] for result in results),
            "bound_share": fmean(shares),
            "bound_share_low": min(shares),
            "bound_share_high": max(shares),
            "d2h_mib": fmean(result["d2h_bytes"] for result in results) / (1 << 20),
            "cpu_ms": fmean(result["cpu_ms"] for result in results),
        }
        if (lru := groups.get(replace(it, label="lru"))) is not None:
            row["hits_vs_lru"] = _mean_ratio(results, lru, "hit_rate")
            row["prefill_vs_lru"] = _mean_ratio(results, lru, "prefill_s")
            row["d2h_vs_lru"] = _mean_ratio(results, lru, "d2h_bytes")
        everything = None if it.memory_share is None else groups.get(replace(it, memory_share=1.0))
        if everything is not None:
            row["hits_vs_all"] = _mean_ratio(results, everything, "hit_rate")
            row["bound_vs_all"] = _mean_ratio(results, everything, "bound_hit_rate")
        rows.append(row)
    return rows


def _mean_ratio(
    results: Sequence[dict[str, float]], others: Sequence[dict[str, float]], name: str
) -> float:
    """Mean over the seeds of one quantity by that of the others with the same seed."""
    return fmean(one[name] / other[name] for one, other in zip(results, others, strict=True))


def table(rows: list[dict[str, float | str]]) -> str:
    columns = {
        "hit_rate": "{:.2%}",
        "hits_vs_lru": "{:.2f}",
        "prefill_vs_lru": "{:.3f}",
        "bound_share": "{:.3f}",
        "bound_share_low": "{:.3f}",
        "bound_share_high": "{:.3f}",
        "d2h_mib": "{:.1f}",
        "d2h_vs_lru": "{:.2f}",
        "hits_vs_all": "{:.1%}",
        "bound_vs_all": "{:.1%}",
        "cpu_ms": "{:.2f}",
    }
    columns = {name: form for name, form in columns.items() if any(name in row for row in rows)}
    lines = [f"{'workload':<20} {'GiB':>4} {'policy':<26} " + " ".join(f"{c:>16}" for c in columns)]
    for row in rows:
        cells = [f.format(row[c]) if c in row else "" for c, f in columns.items()]
        lines.append(
            f"{row['workload']:<20} {row['host_gib']:>4.0f} {row['policy']:<26} "
            + " ".join(f"{cell:>16}" for cell in cells)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
