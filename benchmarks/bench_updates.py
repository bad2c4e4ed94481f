#!/usr/bin/env python3
"""Documents that are updated while clients ask about them: hit rates over time, stale answers.

Eight clients ask about two documents of a corpus at a time, and every so many requests one document
gets a new text. Arms, each on a server of its own: `invalidate` tells the server, `versions` leaves
that to `retire_older_versions`, `nothing` does neither, so that old texts stay until they are
evicted. No arm should ever answer from an old text: a sample of the answers is compared with
those of an empty cache, token for token.

    python benchmarks/bench_updates.py --model-path MODEL [--json] [--requests N]
        [--update-every N ...] [--documents N] [--document-tokens N]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from statistics import fmean, median
from typing import Any

import psutil
from rag_radix_frontend.connections import Connections

from rag_radix.launch import serving

CLIENTS = 8
ARMS: dict[str, dict[str, Any]] = {
    "invalidate": {},
    "versions": {"retire_older_versions": True},
    "nothing": {},
}
_SYSTEM = list(range(1000, 1032))
_TOKEN_IDS = range(1032, 20_000)
_QUESTION_IDS = range(20_000, 30_000)
_QUESTION_TOKENS = 8
_PARTS = 10


class Corpus:
    """Documents whose texts change; a new text begins with half of the old one.

    Args:
        documents: How many there are.
        tokens: Length of each.
    """

    def __init__(self, documents: int, tokens: int) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        self._versions = [0] * documents

    def update(self, document: int) -> None:
        """Give a document a new text."""
        with self._lock:
            self._versions[document] += 1

    def body(self, documents: list[int], question: int) -> dict[str, Any]:
        """The request that asks about documents as they are now."""
        with self._lock:
            versions = [self._versions[document] for document in documents]
        ids, spans = list(_SYSTEM), []
        for document, number in zip(documents, versions, strict=True):
            start, half = len(ids), self._tokens // 2
            ids += random.Random(f"{document}").choices(_TOKEN_IDS, k=half)
            ids += random.Random(f"{document} {number}").choices(_TOKEN_IDS, k=self._tokens - half)
            spans.append({"id": name(document), "version": f"{number}", "start": start})
            spans[-1]["end"] = len(ids)
        ids += random.Random(f"question {question}").choices(_QUESTION_IDS, k=_QUESTION_TOKENS)
        sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        return {
            "input_ids": ids,
            "sampling_params": {**sampling, "custom_params": {"rag": {"documents": spans}}},
        }


@dataclass(frozen=True)
class Plan:
    """What is asked, and which document is updated before which request."""

    asked: list[list[int]]
    updates: dict[int, int]


def plan(documents: int, requests: int, update_every: int) -> Plan:
    """Requests for two documents, the n-th of which is chosen in proportion to 1 / n, as are those
    that are updated; `update_every` 0 updates none."""
    rng = random.Random(1)
    weights = [1 / (rank + 1) for rank in range(documents)]
    chosen = [rng.choices(range(documents), weights, k=2) for _ in range(requests)]
    due = range(update_every, requests, update_every) if update_every else ()
    updates = {index: rng.choices(range(documents), weights)[0] for index in due}
    return Plan([list(dict.fromkeys(each)) for each in chosen], updates)


def name(document: int) -> str:
    return f"document/{document}"


def main() -> None:
    """Measure, and print a table or, with `--json`, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--update-every", type=int, nargs="+", default=[0, 50, 10])
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--document-tokens", type=int, default=200)
    parser.add_argument("--compare", type=int, default=24, help="answers with an empty cache")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    device_tokens = max(options.documents * options.document_tokens // 2, 4096)
    flags = ["--max-total-tokens", str(device_tokens), "--hicache-ratio", "4"]
    flags += ["--context-length", "2048", "--dtype", "float32"]
    arms: dict[str, dict[str, Any]] = {}
    for arm in options.arms:
        settings = json.dumps(ARMS[arm])
        with serving(
            options.model_path, [*flags, "--radix-eviction-policy-config", settings]
        ) as url:
            connections = Connections(url)
            arms[arm] = {
                str(every): _measure(connections, arm, every, options)
                for every in options.update_every
            }
    print(_table(arms))
    if options.json:
        result = {
            "arms": arms,
            "settings": vars(options),
            "python": platform.python_version(),
            "sglang": version("sglang"),
            "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        }
        print(json.dumps(result))


@dataclass(frozen=True)
class Answer:
    """An answered request, with the share of its prompt that wasn't computed."""

    body: dict[str, Any]
    output_ids: list[int]
    hit_rate: float


def _measure(
    server: Connections, arm: str, update_every: int, options: argparse.Namespace
) -> dict[str, Any]:
    corpus = Corpus(options.documents, options.document_tokens)
    todo = plan(options.documents, options.requests, update_every)
    calls_s: list[float] = []

    def ask(index: int) -> Answer:
        if (updated := todo.updates.get(index)) is not None:
            corpus.update(updated)
            if arm == "invalidate":
                calls_s.append(_invalidate(server, updated))
        body = corpus.body(todo.asked[index], index)
        return _answer(server, body)

    _flush(server)
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, range(options.requests)))
    held = server.request("/rag/stats").json()
    compared = random.Random(2).sample(answers, min(options.compare, len(answers)))
    others = 0
    for answer in compared:
        _flush(server)
        others += _answer(server, answer.body).output_ids != answer.output_ids
    size = -(-len(answers) // _PARTS)
    parts = [answers[at : at + size] for at in range(0, len(answers), size)]
    return {
        "updates": len(todo.updates),
        "hit_rate": fmean(answer.hit_rate for part in parts[1:] for answer in part),
        "hit_rate_over_time": [fmean(answer.hit_rate for answer in part) for part in parts],
        "median_call_ms": 1e3 * median(calls_s) if calls_s else None,
        "compared": len(compared),
        "other_than_from_an_empty_cache": others,
        "cached_documents": {tier: held[tier]["documents"] for tier in ("device", "host")},
    }


def _answer(server: Connections, body: dict[str, Any]) -> Answer:
    reply = server.request("/generate", body).json()
    found: float = reply["meta_info"]["cached_tokens"] / len(body["input_ids"])
    return Answer(body, reply["output_ids"], found)


def _invalidate(server: Connections, document: int) -> float:
    """Tell the server that a document has changed; seconds until it has answered."""
    started_s = time.perf_counter()
    status = server.request("/rag/invalidate", {"id": name(document)}).status_code
    assert status in (200, 404), status  # 404: it isn't cached
    return time.perf_counter() - started_s


def _flush(server: Connections) -> None:
    assert server.request("/flush_cache", {}).status_code == 200


def _table(arms: dict[str, dict[str, Any]]) -> str:
    lines = ["update every | arm        | hit rate | over time"]
    for arm, loads in arms.items():
        for every, load in loads.items():
            over_time = " ".join(f"{rate:3.0%}" for rate in load["hit_rate_over_time"])
            lines.append(
                f"{every:>12} | {arm:<10} | {load['hit_rate']:8.1%} | {over_time}; "
                f"{load['other_than_from_an_empty_cache']} of {load['compared']} answers other "
                "than from an empty cache"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
