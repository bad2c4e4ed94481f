#!/usr/bin/env python3
"""Time to first token after a restart: documents from storage against computing them again.

A server with an empty directory answers each question (cold), then once more, and is killed as
soon as its files have come to rest. One that is started on the same directory answers the same
questions in the same order (restored), with the knowledge tree another one as well that has loaded
its hottest documents to host before the first question (preloaded). The knowledge tree and stock
HiCache, both over `--hicache-storage-backend file`, take turns, each first in every other round.

    python benchmarks/bench_restart.py [--json] [--model-path MODEL] [--documents N]
        [--document-tokens N] [--page-size N] [--rounds N] [--arms knowledge-tree stock]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rag_radix.launch import serving

_MODEL = Path(__file__).resolve().parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct"
_SYSTEM_TOKENS = 64
_QUESTION_TOKENS = 16
_REST_S = 2.0
_TREE = ("--radix-cache-backend", "knowledge-tree")
ARMS = {"knowledge-tree": _TREE, "stock": ("--hicache-write-policy", "write_through")}


@dataclass
class Measured:
    """Of one arm, over all rounds."""

    cold_ms: list[float] = field(default_factory=list)
    restored: Restored = field(default_factory=lambda: Restored())
    preloaded: Restored = field(default_factory=lambda: Restored())
    stored_bytes: int = 0
    files: int = 0

    def summary(self) -> dict[str, Any]:
        cold = statistics.median(self.cold_ms)
        summary: dict[str, Any] = {"cold_median_ms": cold}
        for name in ("restored", "preloaded"):
            if (each := getattr(self, name)).times_ms:
                summary[name] = each.summary(cold)
        return {**summary, "stored_bytes": self.stored_bytes, "files": self.files}


@dataclass
class Restored:
    """Of servers that were started again.

    Attributes:
        times_ms: Until the first token.
        found: Prompt tokens by where they were found.
        prompt_tokens: All of them.
        preloading_s: From the first answer until what is preloaded was there.
    """

    times_ms: list[float] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    preloading_s: list[float] = field(default_factory=list)

    def summary(self, cold_ms: float) -> dict[str, Any]:
        median = statistics.median(self.times_ms)
        return {
            "median_ms": median,
            "p90_ms": statistics.quantiles(self.times_ms, n=10)[-1],
            "cold_by_this": cold_ms / median,
            "found": {tier: n / self.prompt_tokens for tier, n in self.found.items()},
            "preloading_s": self.preloading_s,
        }


def prompts(documents: int, document_tokens: int) -> list[dict[str, Any]]:
    """A request for each document: system text, the document, a question."""
    rng = random.Random(0)

    def text(tokens: int) -> list[int]:
        return [rng.randrange(1000, 20_000) for _ in range(tokens)]

    system = text(_SYSTEM_TOKENS)
    end = _SYSTEM_TOKENS + document_tokens
    return [
        {
            "input_ids": [*system, *text(document_tokens), *text(_QUESTION_TOKENS)],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 1,
                "custom_params": {
                    "rag": {
                        "documents": [{"id": f"doc/{i}", "start": _SYSTEM_TOKENS, "end": end}],
                        "unit": "token",
                    }
                },
            },
        }
        for i in range(documents)
    ]


def ask(url: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Milliseconds until the only output token, and what the server says of it."""
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer = json.load(reply)
    return 1000 * (time.perf_counter() - started), answer


@contextmanager
def server(
    arm: str, directory: Path, options: argparse.Namespace, *, preloads: bool = False
) -> Iterator[str]:
    """A server that has answered one question of its own."""
    config = {"preload_host_share": 1 if preloads else 0}
    extra = {"prefetch_threshold": options.page_size, "file_storage_path": str(directory)}
    flags = [
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
        *("--page-size", str(options.page_size)),
        *("--max-total-tokens", str(options.max_total_tokens)),
        *ARMS[arm],
    ]
    if arm == "knowledge-tree":
        flags += ["--radix-eviction-policy-config", json.dumps(config)]
    with serving(str(options.model_path), flags, program="sglang") as url:
        ask(url, {"input_ids": [7] * 300, "sampling_params": {"max_new_tokens": 1}})
        yield url


def wait_until_at_rest(directory: Path) -> None:
    """Until the files in `directory` have been the same for a while."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < _REST_S:
        time.sleep(0.2)
        if (now := _size(directory)[0]) != last:
            last, since = now, time.monotonic()


def wait_until_preloaded(url: str) -> float:
    """Seconds until all that is to come by itself has come."""
    since = time.monotonic()
    while True:
        with urllib.request.urlopen(f"{url}/rag/stats", timeout=60) as reply:
            if json.load(reply)["storage"]["preloaded"]["state"] != "running":
                return time.monotonic() - since
        time.sleep(0.1)


def _size(directory: Path) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.suffix in (".kv", ".bin")]
    return sum(sizes), len(sizes)


def measure(
    arm: str, bodies: Sequence[dict[str, Any]], options: argparse.Namespace, into: Measured
) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-restart-") as name:
        directory = Path(name)
        with server(arm, directory, options) as url:
            answers = []
            for body in bodies:
                ms, answer = ask(url, body)
                into.cold_ms.append(ms)
                answers.append(answer["output_ids"])
            for body in bodies:
                ask(url, body)
            wait_until_at_rest(directory)
            # Its processes are ended without notice when the block is left.
        into.stored_bytes, into.files = _size(directory)
        for preloads in (False, True) if arm == "knowledge-tree" else (False,):
            restored = into.preloaded if preloads else into.restored
            with server(arm, directory, options, preloads=preloads) as url:
                if preloads:
                    restored.preloading_s.append(wait_until_preloaded(url))
                for body, expected in zip(bodies, answers, strict=True):
                    ms, answer = ask(url, body)
                    restored.times_ms.append(ms)
                    restored.prompt_tokens += len(body["input_ids"])
                    details = answer["meta_info"].get("cached_tokens_details") or {}
                    restored.found.update(
                        {tier: details.get(tier, 0) for tier in ("device", "host", "storage")}
                    )
                    if options.exact and answer["output_ids"] != expected:
                        raise SystemExit(f"{arm}: another answer after the restart")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="only the last line, as JSON")
    parser.add_argument("--model-path", type=Path, default=_MODEL)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--document-tokens", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-total-tokens", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="answers must agree (fp32 models)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    bodies = prompts(options.documents, options.document_tokens)
    measured = {arm: Measured() for arm in options.arms}
    for number in range(options.rounds):
        for arm in options.arms[:: 1 if number % 2 == 0 else -1]:
            measure(arm, bodies, options, measured[arm])
            if not options.json:
                print(f"round {number + 1}, {arm}: {measured[arm].summary()}", flush=True)
    report = {
        "benchmark": "restart",
        "model": options.model_path.name,
        "documents": options.documents,
        "document_tokens": options.document_tokens,
        "page_size": options.page_size,
        "rounds": options.rounds,
        "arms": {arm: each.summary() for arm, each in measured.items()},
        "versions": {name: version(name) for name in ("rag-radix", "sglang", "torch")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
