#!/usr/bin/env python3
"""What speculation costs a client: CPU time of its process for a retrieval and its answer.

The server is another process and has no model. The search waits between its stages; each but the
last has other documents, so of `--guesses` one is right and the others are ended. The same
programs run with and without speculation in turn; the difference is its cost.

    python benchmarks/bench_client.py [--json] [--guesses N ...] [--stage-ms MS] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import sglang as sgl
from openai import AsyncOpenAI
from rag_radix_frontend import (
    Document,
    RagEndpoint,
    ScoredDocument,
    Stage,
    rag_retrieve,
    retrieve_and_generate,
)

TARGET_MS = 2.0
_TEXT = "A sentence of a document, as long as sentences are. " * 100
_DOCUMENTS = tuple(Document(f"document/{i}", f"{i}. {_TEXT}") for i in range(64))


@dataclass(frozen=True)
class Search:
    """A search with a stage for each guess, the last of which is found again at its end."""

    guesses: int
    stage_s: float

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        for i in range(self.guesses):
            found = tuple(ScoredDocument(d, 1.0) for d in _DOCUMENTS[i * k : (i + 1) * k])
            time.sleep(self.stage_s)
            yield Stage(found, final=False)
        time.sleep(self.stage_s)
        yield Stage(found, final=True)


@sgl.function  # type: ignore[untyped-decorator, unused-ignore]
def _program(s: Any, search: Search, speculative: bool) -> None:
    s += sgl.system("Answer from the documents.")
    s += sgl.user(rag_retrieve(search, "question", speculative=speculative) + "Is it?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=8, temperature=0))


def main() -> None:
    """Measure, and print a table or, with `--json`, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guesses", type=int, nargs="+", default=[1, 2, 4, 7])
    parser.add_argument("--clients", nargs="+", choices=_CLIENTS, default=list(_CLIENTS))
    parser.add_argument("--stage-ms", type=float, default=5.0, help="between two stages")
    parser.add_argument("--answer-ms", type=float, default=30.0, help="the server takes to answer")
    parser.add_argument("--retrievals", type=int, default=40, help="in each part of a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    with _server(options.answer_ms) as url:
        clients = {
            name: {
                str(guesses): _measure(_CLIENTS[name](url), guesses, options)
                for guesses in options.guesses
            }
            for name in options.clients
        }
    result = {
        "target_ms": TARGET_MS,
        "clients": clients,
        "settings": vars(options),
        "python": platform.python_version(),
        "sglang": version("sglang"),
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
    }
    print(_table(clients, options))
    if options.json:
        print(json.dumps(result))


@contextmanager
def _server(answer_ms: float) -> Iterator[str]:
    script = Path(__file__).with_name("guessing_server.py")
    command = [sys.executable, str(script), "--answer-ms", str(answer_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def _programs(url: str) -> Callable[[Search, bool], Any]:
    backend = RagEndpoint(url, chat_template_name="chatml")

    def run(search: Search, speculative: bool) -> Any:
        state = _program.run(search, speculative, backend=backend)
        assert state["answer"] == "yes"
        return state.get_meta_info("docs")

    return run


def _chats(url: str) -> Callable[[Search, bool], Any]:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    loop = asyncio.new_event_loop()

    def run(search: Search, speculative: bool) -> Any:
        async def answer() -> Any:
            return await retrieve_and_generate(
                client,
                search,
                "question",
                lambda documents: [
                    {"role": "system", "content": "\n\n".join(d.text for d in documents)},
                    {"role": "user", "content": "Is it?"},
                ],
                speculative=speculative,
                model="none",
            )

        return loop.run_until_complete(answer()).retrieval

    return run


_CLIENTS = {"programs": _programs, "chats": _chats}


def _measure(
    run: Callable[[Search, bool], Any], guesses: int, options: argparse.Namespace
) -> dict[str, float]:
    search = Search(guesses, options.stage_ms / 1e3)
    kept = 0

    def cpu_ms(speculative: bool) -> float:
        nonlocal kept
        start_s = time.process_time()
        for _ in range(options.retrievals):
            kept += run(search, speculative).kept
        spent_s = time.process_time() - start_s
        return 1e3 * spent_s / int(options.retrievals)

    run(search, True)
    kept, rounds = 0, []
    for i in range(options.rounds):
        gc.collect()
        parts = {speculative: cpu_ms(speculative) for speculative in (i % 2 == 0, i % 2 == 1)}
        rounds.append(parts)
    costs = [each[True] - each[False] for each in rounds]
    return {
        "off_ms": statistics.median(each[False] for each in rounds),
        "on_ms": statistics.median(each[True] for each in rounds),
        "cost_ms": statistics.median(costs),
        "least_ms": min(costs),
        "most_ms": max(costs),
        "kept": kept / (options.rounds * options.retrievals),
    }


def _table(clients: dict[str, dict[str, dict[str, float]]], options: argparse.Namespace) -> str:
    lines = [
        f"CPU time of a client for a retrieval, a stage each {options.stage_ms:g} ms, an answer in "
        f"{options.answer_ms:g} ms (goal: {TARGET_MS:g} ms more at most)",
        f"{'client':<10}{'guesses':>8}{'off':>11}{'on':>11}{'cost':>11}{'kept':>8}",
    ]
    lines += [
        f"{name:<10}{guesses:>8}{each['off_ms']:>8.2f} ms{each['on_ms']:>8.2f} ms"
        f"{each['cost_ms']:>8.2f} ms{each['kept']:>8.0%}"
        f"  ({each['least_ms']:.2f} to {each['most_ms']:.2f})"
        for name, measured in clients.items()
        for guesses, each in measured.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
