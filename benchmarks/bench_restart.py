#!/usr/bin/env python3
"""Time to first token after a restart: documents from storage against computing them again.

A server with an empty directory answers each question (cold), then once more, and is killed as
soon as its files have come to rest. One that is started on the same directory answers the same
questions in the same order (restored). The knowledge tree and stock HiCache, both over
`--hicache-storage-backend file`, take turns, the first one another in each round.

    python benchmarks/bench_restart.py [--json] [--model-path MODEL] [--documents N]
        [--document-tokens N] [--page-size N] [--rounds N]
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
    restored_ms: list[float] = field(default_factory=list)
    storage_tokens: int = 0
    prompt_tokens: int = 0
    stored_bytes: int = 0
    files: int = 0

    def summary(self) -> dict[str, Any]:
        cold, restored = statistics.median(self.cold_ms), statistics.median(self.restored_ms)
        return {
            "cold_median_ms": cold,
            "restored_median_ms": restored,
            "restored_p90_ms": statistics.quantiles(self.restored_ms, n=10)[-1],
            "cold_by_restored": cold / restored,
            "from_storage": self.storage_tokens / self.prompt_tokens,
            "stored_bytes": self.stored_bytes,
            "files": self.files,
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
def server(arm: str, directory: Path, options: argparse.Namespace) -> Iterator[str]:
    """A server that has answered one question of its own."""
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
        with server(arm, directory, options) as url:
            for body, expected in zip(bodies, answers, strict=True):
                ms, answer = ask(url, body)
                into.restored_ms.append(ms)
                details = answer["meta_info"].get("cached_tokens_details") or {}
                into.storage_tokens += details.get("storage", 0)
                into.prompt_tokens += len(body["input_ids"])
                if options.exact and answer["output_ids"] != expected:
                    raise SystemExit(f"{arm}: another answer after the restart")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="only the last line, as JSON")
    parser.add_argument("--model-path", type=Path, default=_MODEL)
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
    measured = {arm: Measured() for arm in ARMS}
    for number in range(options.rounds):
        for arm in list(ARMS)[:: 1 if number % 2 == 0 else -1]:
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
