#!/usr/bin/env python3
"""`rag_prefix` against `torch_native` on the real SGLang server, CPU.

Two servers that differ in `--attention-backend` alone run side by side and answer the same
requests in turn, so that whatever else the machine does meets both. An idle server sleeps.
Times are what a client waits. A ratio is `torch_native` over `rag_prefix`: above 1, ours is
faster.

    python benchmarks/bench_prefix_attention.py [--json] [--model DIR] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from e2e.cpu_server import Server, running_server  # noqa: E402

BACKENDS = ("rag_prefix", "torch_native")
COLD_TOKENS = (256, 1024, 4000)
CACHED_TOKENS = 4000
DECODE_CONTEXTS = (16, 2000)
DECODE_TOKENS = 48
VOCABULARY = range(1000, 40000)
FLAGS = ("--max-total-tokens", "60000", "--random-seed", "0", "--log-level", "warning")


@dataclass(frozen=True)
class Case:
    """One kind of request, measured on both servers.

    Attributes:
        name: Key in the JSON report.
        unit: What a time stands for.
        times_s: Times by backend, in the order they were taken.
        same_output: Whether both servers produced the same tokens every time.
    """

    name: str
    unit: str
    times_s: dict[str, list[float]]
    same_output: bool

    def report(self) -> dict[str, Any]:
        """Spread of the times and of the ratio of each pair."""
        ours, theirs = (self.times_s[backend] for backend in BACKENDS)
        return {
            "unit": self.unit,
            **{backend: _spread(times) for backend, times in self.times_s.items()},
            "ratio": statistics.median(theirs) / statistics.median(ours),
            "paired_ratio": _spread([b / a for a, b in zip(ours, theirs, strict=True)]),
            "same_output": self.same_output,
        }


def main() -> None:
    """Measure, and print a table or, with `--json`, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/models/SmolLM2-135M-Instruct")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="as for SGLang")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    if not options.model.is_dir():
        parser.error(f"no model in {options.model}; scripts/prepare_model.py makes the default one")

    with ExitStack() as stack:
        servers = {
            backend: stack.enter_context(
                running_server(
                    options.model,
                    "--attention-backend",
                    backend,
                    "--dtype",
                    options.dtype,
                    *FLAGS,
                )
            )
            for backend in BACKENDS
        }
        _progress("both servers are up")
        cases = _measure(servers, options.repeats)
    report = _report(cases, options)
    print(json.dumps(report) if options.json else _table(report))


def _measure(servers: dict[str, Server], repeats: int) -> list[Case]:
    numbers = random.Random(0)
    for tokens in (16, 1024):  # first-use costs of both
        _alternate("warm-up", "", servers, 1, _prefill_timer(numbers, tokens))
    cases = [
        _alternate(f"cold_{tokens}", "s to the first token", servers, repeats, timer)
        for tokens in COLD_TOKENS
        for timer in (_prefill_timer(numbers, tokens),)
    ]
    prompt = _prompt(numbers, CACHED_TOKENS)
    for server in servers.values():
        _generate(server, prompt, 1)
    cases.append(
        _alternate(
            f"cached_{CACHED_TOKENS}",
            "s to the first token",
            servers,
            repeats,
            lambda: lambda server: _time_cached(server, prompt),
        )
    )
    for context in DECODE_CONTEXTS:
        timer = _decode_timer(_prompt(numbers, context))
        cases.append(_alternate(f"decode_{context}", "s per token", servers, repeats, timer))
    return cases


Measurement = Callable[[Server], tuple[float, list[int]]]


def _alternate(
    name: str,
    unit: str,
    servers: dict[str, Server],
    repeats: int,
    next_measurement: Callable[[], Measurement],
) -> Case:
    """Take `repeats` pairs of measurements, swapping which backend goes first."""
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    same = True
    for repeat in range(repeats):
        measure = next_measurement()
        outputs = []
        for backend in BACKENDS if repeat % 2 == 0 else BACKENDS[::-1]:
            seconds, tokens = measure(servers[backend])
            times[backend].append(seconds)
            outputs.append(tokens)
        same &= outputs[0] == outputs[1]
    _progress(f"{name}: { ({b: round(statistics.median(t), 4) for b, t in times.items()}) }")
    return Case(name, unit, times, same)


def _prefill_timer(numbers: random.Random, tokens: int) -> Callable[[], Measurement]:
    def next_measurement() -> Measurement:
        prompt = _prompt(numbers, tokens)
        return lambda server: _generate(server, prompt, 1)[:2]

    return next_measurement


def _decode_timer(prompt: list[int]) -> Callable[[], Measurement]:
    def measure(server: Server) -> tuple[float, list[int]]:
        _generate(server, prompt, 1)  # so that both runs below find the prompt cached
        first_s, _, _ = _generate(server, prompt, 1)
        all_s, tokens, _ = _generate(server, prompt, 1 + DECODE_TOKENS)
        return (all_s - first_s) / DECODE_TOKENS, tokens

    return lambda: measure


def _time_cached(server: Server, prompt: list[int]) -> tuple[float, list[int]]:
    seconds, tokens, cached = _generate(server, prompt, 1)
    if cached != len(prompt) - 1:
        raise RuntimeError(f"{cached} tokens were cached, not {len(prompt) - 1}")
    return seconds, tokens


def _generate(server: Server, prompt: list[int], tokens: int) -> tuple[float, list[int], int]:
    """Seconds waited, output tokens, cached tokens of a greedy request."""
    start = time.perf_counter()
    reply = server.generate(
        input_ids=prompt,
        sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    )
    seconds = time.perf_counter() - start
    return seconds, reply["output_ids"], reply["meta_info"]["cached_tokens"]


def _prompt(numbers: random.Random, tokens: int) -> list[int]:
    return numbers.choices(VOCABULARY, k=tokens)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _report(cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    reports = {case.name: case.report() for case in cases}
    cached = reports[f"cached_{CACHED_TOKENS}"]
    return {
        "cached_4k_s": cached["rag_prefix"]["median"],
        "torch_native_cached_4k_s": cached["torch_native"]["median"],
        "ratio": cached["ratio"],
        "spread": {name: cached[name] for name in (*BACKENDS, "paired_ratio")},
        "cold_ratios": {str(n): reports[f"cold_{n}"]["ratio"] for n in COLD_TOKENS},
        "decode_ratios": {str(n): reports[f"decode_{n}"]["ratio"] for n in DECODE_CONTEXTS},
        "cases": reports,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("sglang", "torch", "rag-radix")},
        },
        "hardware": {
            "processor": _processor(),
            "cores": psutil.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "config": {
            "model": options.model.name,
            "dtype": options.dtype,
            "repeats": options.repeats,
            "decode_tokens": DECODE_TOKENS,
            "flags": list(FLAGS),
        },
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _table(report: dict[str, Any]) -> str:
    lines = [f"{'case':<12} {'rag_prefix':>11} {'torch_native':>13} {'ratio':>8}  ratio min..max"]
    for name, case in report["cases"].items():
        pairs = case["paired_ratio"]
        lines.append(
            f"{name:<12} {case['rag_prefix']['median']:>10.4f}s "
            f"{case['torch_native']['median']:>12.4f}s {case['ratio']:>7.2f}x"
            f"  {pairs['min']:.2f}..{pairs['max']:.2f}  ({case['unit']})"
        )
    return "\n".join(lines)


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
