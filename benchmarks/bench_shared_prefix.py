#!/usr/bin/env python3
"""Reading a shared prefix once for a batch against once for each of its requests, CPU.

The attention part: the backend `rag_prefix` alone, over pools of SGLang, for all layers of a
model with SmolLM2-135M's shapes (9 heads, 3 KV heads of 64, 30 layers) and the plan of the pass.
Both ways alternate within one run, so that whatever else the machine does meets both. A ratio is
ungrouped over grouped: above 1, grouping is faster.

    python benchmarks/bench_shared_prefix.py [--json] [--dtype bfloat16] [--repeats N]
    python benchmarks/bench_shared_prefix.py --thresholds  # from which size on a range pays
    python benchmarks/bench_shared_prefix.py --server      # TPOT of 8 questions, real servers
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from rag_radix_kernels.options import SHARED_PREFIX  # noqa: E402

QUERY_HEADS, KV_HEADS, DIM, LAYERS = 9, 3, 64, 30
# Slots that lie one after the other: a document's are mostly allocated at once.
SLOT_RUN = 256
SHARED_TOKENS = 2000
QUESTION_TOKENS = 30
BATCHES = (1, 4, 8, 16)
SERVER_REQUESTS = 8
SERVER_TOKENS = 48
SERVER_FLAGS = ("--attention-backend", "rag_prefix", "--max-total-tokens", "30000")
SERVER_FLAGS += ("--random-seed", "0", "--log-level", "warning")


@dataclass(frozen=True)
class Case:
    """A batch over one pool.

    Attributes:
        kind: "decode", or "extend" by a question for each request.
        requests: How many.
        shared_tokens: What all begin with.
        own_tokens: What each has cached besides.
    """

    kind: str
    requests: int
    shared_tokens: int
    own_tokens: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.requests}x({self.shared_tokens}+{self.own_tokens})"

    @property
    def new_tokens(self) -> int:
        return 1 if self.kind == "decode" else QUESTION_TOKENS


def attention_cases() -> list[Case]:
    """What is promised: shared prefixes, and that nothing is lost where nothing is shared."""
    shared = [
        Case(kind, requests, SHARED_TOKENS, 50 if kind == "decode" else 0)
        for kind in ("decode", "extend")
        for requests in BATCHES
    ]
    return [*shared, *(Case(kind, 8, 0, SHARED_TOKENS) for kind in ("decode", "extend"))]


def threshold_cases() -> list[Case]:
    """Ranges around the least that pays."""
    return [
        Case(kind, requests, shared, 50)
        for kind in ("decode", "extend")
        for requests in (2, 4, 8, 16)
        for shared in (64, 128, 256, 512, 1024)
    ]


def measure(case: Case, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Seconds of a pass by way, and the ratio of each pair."""
    times: dict[str, list[float]] = {"grouped": [], "ungrouped": []}
    passes = _passes(case, dtype)
    for repeat in range(repeats + 1):
        order = list(passes.items())
        for name, run in order if repeat % 2 else order[::-1]:
            start = time.perf_counter()
            run()
            if repeat:  # the first pair pays for what is allocated once
                times[name].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(times["grouped"], times["ungrouped"], strict=True)]
    report = {name: _spread(values) for name, values in times.items()}
    saved_keys = (case.requests - 1) * case.shared_tokens
    return {"saved_keys": saved_keys, "unit": "s per pass", **report, "ratio": _spread(ratios)}


def _passes(case: Case, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    from rag_radix_kernels.prefix_backend import PrefixAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    own = case.own_tokens + case.new_tokens
    length = case.shared_tokens + own
    runs = list(torch.arange(1, case.shared_tokens + case.requests * own + 1).split(SLOT_RUN))
    slots = torch.cat(random.Random(0).sample(runs, len(runs)))
    table = torch.zeros((case.requests, length), dtype=torch.int32)
    table[:, : case.shared_tokens] = slots[: case.shared_tokens]
    table[:, case.shared_tokens :] = slots[case.shared_tokens :].view(case.requests, own)
    pool = MHATokenToKVPool(len(slots), 1, dtype, KV_HEADS, DIM, LAYERS, "cpu", False)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    runner = SimpleNamespace(
        device="cpu",
        model_config=SimpleNamespace(get_num_kv_heads=lambda ranks: KV_HEADS),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
    )
    new_tokens = torch.full((case.requests,), case.new_tokens)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if case.kind == "decode" else ForwardMode.EXTEND,
        req_pool_indices=torch.arange(case.requests),
        seq_lens=torch.full((case.requests,), length),
        extend_seq_lens=new_tokens,
        extend_prefix_lens=length - new_tokens,
        out_cache_loc=table[:, length - case.new_tokens :].flatten().long(),
        encoder_lens=None,
    )
    layers = [
        RadixAttention(QUERY_HEADS, DIM, scaling=0.125, num_kv_heads=KV_HEADS, layer_id=layer)
        for layer in range(LAYERS)
    ]
    rows = case.requests * case.new_tokens
    query = torch.randn(rows, QUERY_HEADS * DIM).to(dtype)
    key, value = (torch.randn(rows, KV_HEADS, DIM).to(dtype) for _ in range(2))

    def passing(backend: Any) -> Callable[[], None]:
        forward = backend.forward_decode if case.kind == "decode" else backend.forward_extend

        def run() -> None:
            backend.init_forward_metadata(batch)
            for layer in layers:
                forward(query, key, value, layer, batch)

        return run

    passes = {}
    for name, setting in (("grouped", "1"), ("ungrouped", "0")):
        os.environ[SHARED_PREFIX] = setting
        passes[name] = passing(PrefixAttnBackend(runner))
    return passes


def measure_planner(repeats: int) -> dict[str, Any]:
    """CPU time of finding what 64 requests share."""
    from rag_radix_kernels.grouping import find_shared_ranges
    from shared_rows import table_of

    shapes: dict[str, Any] = {
        "one document": lambda i: (("doc", 2000),),
        "system prompt and 8 documents": lambda i: (("system", 200), (f"doc {i % 8}", 2000)),
        "nothing shared": lambda i: ((f"doc {i}", 1000),),
    }
    report = {}
    for name, shape in shapes.items():
        paths = [(*shape(i), (f"question {i}", 20 + i)) for i in range(64)]
        table, rows, lengths = table_of(paths)
        times = []
        for _ in range(20 * repeats):
            start = time.thread_time()
            find_shared_ranges(table, rows, lengths)
            times.append(time.thread_time() - start)
        report[name] = {"unit": "s of CPU", **_spread(times)}
    return report


def measure_servers(model: Path, dtype: str, repeats: int) -> dict[str, Any]:
    """Seconds per step in which 8 questions on the same documents each get a token."""
    from e2e.cpu_server import Server, running_server

    def generate(server: Server, prompts: Sequence[list[int]], tokens: int) -> tuple[float, Any]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        start = time.perf_counter()
        replies = server.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - start, [reply["output_ids"] for reply in replies]

    times: dict[str, list[float]] = {"grouped": [], "ungrouped": []}
    same = 0
    numbers = random.Random(0)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                running_server(model, *SERVER_FLAGS, "--dtype", dtype, env={SHARED_PREFIX: setting})
            )
            for name, setting in (("grouped", "1"), ("ungrouped", "0"))
        }
        for repeat in range(repeats):
            documents = numbers.choices(range(1000, 40000), k=SHARED_TOKENS)
            prompts = [
                documents + numbers.choices(range(1000, 40000), k=QUESTION_TOKENS)
                for _ in range(SERVER_REQUESTS)
            ]
            outputs = []
            for name in ("grouped", "ungrouped")[:: 1 if repeat % 2 else -1]:
                server = servers[name]
                generate(server, [documents], 1)
                generate(server, prompts, 1)
                first_s, _ = generate(server, prompts, 1)
                all_s, tokens = generate(server, prompts, 1 + SERVER_TOKENS)
                times[name].append((all_s - first_s) / SERVER_TOKENS)
                outputs.append(tokens)
            same += sum(a == b for a, b in zip(*outputs, strict=True))
            print({name: round(t[-1], 4) for name, t in times.items()}, file=sys.stderr)
    ratios = [b / a for a, b in zip(times["grouped"], times["ungrouped"], strict=True)]
    return {
        "unit": "s per output token",
        "requests": SERVER_REQUESTS,
        "shared_tokens": SHARED_TOKENS,
        **{name: _spread(values) for name, values in times.items()},
        "ratio": _spread(ratios),
        "same_outputs": f"{same} of {repeats * SERVER_REQUESTS}",
    }


def main() -> None:
    """Measure, and print a table or, with `--json`, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/models/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--thresholds", action="store_true", help="group whatever is shared")
    parser.add_argument("--server", action="store_true", help="measure two real servers instead")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    load_before = psutil.getloadavg()[0]
    report: dict[str, Any] = {}
    if options.server:
        if not options.model.is_dir():
            parser.error(f"no model in {options.model}; scripts/prepare_model.py makes one")
        report["server"] = measure_servers(options.model, options.dtype, options.repeats)
    else:
        with _single_rank(), _thresholds(options.thresholds):
            cases = threshold_cases() if options.thresholds else attention_cases()
            for case in cases:
                report[case.name] = measure(case, getattr(torch, options.dtype), options.repeats)
                print(_line(case.name, report[case.name]), file=sys.stderr, flush=True)
        report = {"attention": report, "planner": measure_planner(options.repeats)}
    report["config"] = {
        "dtype": options.dtype,
        "repeats": options.repeats,
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load": [load_before, psutil.getloadavg()[0]],
        **{name: version(name) for name in ("sglang", "torch", "rag-radix")},
    }
    print(json.dumps(report) if options.json else _table(report))


@contextmanager
def _single_rank() -> Iterator[None]:
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_tp_size=1):
        yield


@contextmanager
def _thresholds(are_measured: bool) -> Iterator[None]:
    """Group whatever is shared, where the least that pays is to be found."""
    from rag_radix_kernels import prefix_backend

    usual = prefix_backend.find_shared_ranges
    if are_measured:
        prefix_backend.find_shared_ranges = lambda *rows, **_: usual(*rows, min_saved_keys=1)
    try:
        yield
    finally:
        prefix_backend.find_shared_ranges = usual


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _line(name: str, case: dict[str, Any]) -> str:
    grouped, ungrouped = (case[way]["median"] * 1e3 for way in ("grouped", "ungrouped"))
    ratio = case["ratio"]
    return (
        f"{name:<26} {grouped:>9.2f} ms {ungrouped:>9.2f} ms {ratio['median']:>6.2f}x"
        f"  {ratio['min']:.2f}..{ratio['max']:.2f}"
    )


def _table(report: dict[str, Any]) -> str:
    lines = [f"{'':<26} {'grouped':>12} {'ungrouped':>12} {'ratio':>7}  min..max"]
    cases = report.get("attention") or {"server, per token": report["server"]}
    lines += [_line(name, case) for name, case in cases.items()]
    for name, plan in report.get("planner", {}).items():
        lines.append(f"plan of 64 requests, {name}: {plan['median'] * 1e6:.0f} µs")
    lines.append(f"load {report['config']['load']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
