"""What replacement policies gain, on replays of the real tree: the claims of the README.

    python benchmarks/bench_policies.py claims      policies against the clairvoyant bound
    python benchmarks/bench_policies.py paper       hit rates over host memory, as in the paper
    python benchmarks/bench_policies.py depth       `max_depth` with five documents a prompt

Every number is a mean over seeds with its range. A run that was interrupted goes on where it
stopped: finished replays are kept in `--results`, one JSON line each. The policies were tuned
on other seeds (101 to 103) than the default ones.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import orjson

GIB = 1 << 30
DEVICE_TOKENS = 50_000
HOST_GIB = 64
DYNAMIC = ("drift", "burst", "drift-burst")
PLUS_QUEUE = "pgdsf-plus, 128 waiting"
POLICIES = {
    "lru": ("lru", {}),
    "lfu": ("lfu", {}),
    "gdsf": ("gdsf", {}),
    "pgdsf": ("pgdsf", {}),
    "pgdsf, node": ("pgdsf", {"frequency": "node"}),
    "pgdsf-plus": ("pgdsf-plus", {}),
    PLUS_QUEUE: ("pgdsf-plus", {}),
}


@dataclass(frozen=True)
class Replay:
    """One policy over one seed of one workload."""

    workload: str
    label: str
    seed: int
    requests: int
    warm_up: int
    host_gib: int = HOST_GIB
    k: int = 2
    max_depth: int | None = None

    @property
    def key(self) -> str:
        return hashlib.blake2b(orjson.dumps(asdict(self)), digest_size=8).hexdigest()


def run(it: Replay) -> dict[str, float]:
    """Replay and bound; sums over the counted requests."""
    from rag_radix.replay.bound import clairvoyant_bound
    from rag_radix.replay.reference_cost import KV_BYTES_PER_TOKEN
    from rag_radix.replay.runs import PolicyVariant, ReplayServer, replay
    from rag_radix.replay.workloads import generate

    requests = generate(it.workload, requests=it.requests, seed=it.seed, k=it.k)
    server = ReplayServer(
        device_tokens=DEVICE_TOKENS,
        host_tokens=it.host_gib * GIB // KV_BYTES_PER_TOKEN,
        queue=128 if it.label == PLUS_QUEUE else 0,
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
    assert totals.document_hit_tokens <= bound.hit_tokens
    return {
        "hit_rate": totals.token_hit_rate,
        "bound_hit_rate": bound.hit_rate,
        "saved_s": bound.uncached_s - totals.prefill_s,
        "bound_saved_s": bound.saved_s,
        "prefill_s": totals.prefill_s,
        "d2h_bytes": totals.d2h_bytes / totals.requests,
        "h2d_bytes": totals.h2d_bytes / totals.requests,
        "cpu_ms": 1e3 * totals.replay_s / totals.requests,
    }


def claims(seeds: Iterable[int], requests: int, warm_up: int) -> Iterator[Replay]:
    for seed in seeds:
        for workload in ("mmlu-like", "mmlu-hot", *DYNAMIC):
            for label in ("lru", "pgdsf", "pgdsf, node", "pgdsf-plus", PLUS_QUEUE):
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


PARTS = {"claims": claims, "paper": paper, "depth": depth}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--requests", type=int, default=120_000)
    parser.add_argument("--warm-up", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("bench_policies.jsonl"))
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    replays = list(PARTS[options.part](seeds, options.requests, options.warm_up))
    done = _finished(options.results)
    missing = [it for it in replays if it.key not in done]
    with (
        options.results.open("ab", buffering=0) as results,
        ProcessPoolExecutor(options.processes) as pool,
    ):
        futures = {pool.submit(run, it): it for it in missing}
        for number, future in enumerate(as_completed(futures), 1):
            it = futures[future]
            done[it.key] = future.result()
            line = {"key": it.key, "replay": asdict(it), "result": done[it.key]}
            results.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            print(f"{number}/{len(missing)} {it.workload} {it.label}", file=sys.stderr)
    rows = summarise(replays, done)
    print(table(rows))
    if options.json:
        print(orjson.dumps(rows).decode())
    return 0


def _finished(path: Path) -> dict[str, dict[str, float]]:
    if not path.exists():
        return {}
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return {line["key"]: line["result"] for line in lines}


def summarise(
    replays: Iterable[Replay], done: dict[str, dict[str, float]]
) -> list[dict[str, float | str]]:
    """Means and ranges over the seeds; ratios to `lru` where it was replayed as well."""
    groups: dict[tuple[object, ...], list[Replay]] = {}
    for it in replays:
        groups.setdefault((it.workload, it.host_gib, it.max_depth, it.label), []).append(it)
    rows: list[dict[str, float | str]] = []
    for (workload, gib, max_depth, label), members in groups.items():
        results = [done[it.key] for it in members]
        lru = [done[it.key] for it in groups.get((workload, gib, max_depth, "lru"), [])]
        shares = [result["saved_s"] / result["bound_saved_s"] for result in results]
        row: dict[str, float | str] = {
            "workload": f"{workload}, k = {members[0].k}",
            "host_gib": float(gib),  # type: ignore[arg-type]
            "policy": f"{label}" + (f", max_depth {max_depth}" if max_depth else ""),
            "hit_rate": fmean(result["hit_rate"] for result in results),
            "bound_hit_rate": fmean(result["bound_hit_rate"] for result in results),
            "bound_share": fmean(shares),
            "bound_share_low": min(shares),
            "bound_share_high": max(shares),
            "d2h_mib": fmean(result["d2h_bytes"] for result in results) / (1 << 20),
            "cpu_ms": fmean(result["cpu_ms"] for result in results),
        }
        if lru:
            pairs = list(zip(results, lru, strict=True))
            row["hits_vs_lru"] = fmean(a["hit_rate"] / b["hit_rate"] for a, b in pairs)
            row["prefill_vs_lru"] = fmean(a["prefill_s"] / b["prefill_s"] for a, b in pairs)
            row["d2h_vs_lru"] = fmean(a["d2h_bytes"] / b["d2h_bytes"] for a, b in pairs)
        rows.append(row)
    return rows


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
        "cpu_ms": "{:.2f}",
    }
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
