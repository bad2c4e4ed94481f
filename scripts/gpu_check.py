"""What `scripts/gpu_check` runs: attention by levels, page copies and times on one device.

Needs torch alone; FlashInfer computes the levels where it can be imported, else plain torch does,
so that the plans and the merging are checked in any case. Takes a minute or two on a GPU, and some
more the first time, when FlashInfer compiles its kernels.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from rag_radix_kernels import prefix_attention, reference
from rag_radix_kernels.cascade import Level, Merge, State, plan_levels, run_levels
from rag_radix_kernels.grouping import find_shared_ranges

# Four roundings of 16-bit values; sums of thousands of float32 terms.
MAX_RELATIVE_ERROR = {
    torch.float32: 1e-5,
    torch.bfloat16: 4 * 2.0**-9,
    torch.float16: 4 * 2.0**-12,
}
SCALE = 0.125


@dataclass(frozen=True)
class Shape:
    """Requests on the paths of a tree.

    Attributes:
        requests: How many.
        system_tokens: What all begin with.
        document_tokens: What every other one goes on with; the rest has another document.
        own_tokens: What nobody shares, the new tokens among them.
        heads: Query heads and KV heads.
        dim: Of a head.
    """

    requests: int
    system_tokens: int
    document_tokens: int
    own_tokens: int
    heads: tuple[int, int] = (32, 8)
    dim: int = 128

    @property
    def name(self) -> str:
        tokens = f"{self.system_tokens}+{self.document_tokens}+{self.own_tokens}"
        return f"{self.requests}x({tokens}) {self.heads[0]}/{self.heads[1]}x{self.dim}"


CHECKED = [
    Shape(1, 0, 0, 300),
    Shape(2, 0, 1500, 40),
    Shape(8, 200, 1800, 30, heads=(9, 3), dim=64),
    Shape(16, 1000, 1000, 60),
    Shape(64, 150, 700, 20, heads=(16, 16), dim=64),
    Shape(5, 4000, 4000, 100, heads=(64, 8)),
]
CHECKED_ON_CPU = [Shape(1, 0, 0, 30), Shape(6, 200, 900, 20, heads=(9, 3), dim=64)]
TIMED = [Shape(n, 0, tokens, 64) for tokens in (2000, 8000) for n in (1, 4, 8, 16, 64)]
TIMED_ON_CPU = [Shape(4, 0, 2000, 64, heads=(9, 3), dim=64)]


class Batch:
    """A pool on the device, and requests that read it."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str, *, extend: bool) -> None:
        torch.manual_seed(0)
        paths = [(0, 1 + i % 2, 3 + i) for i in range(shape.requests)]
        # Every third request is longer, so that a batch is ragged.
        own = [shape.own_tokens * (1 + i % 3) for i in range(shape.requests)]
        sizes = {0: shape.system_tokens, 1: shape.document_tokens, 2: shape.document_tokens}
        sizes |= {3 + i: tokens for i, tokens in enumerate(own)}
        slots = torch.randperm(sum(sizes.values())).int()
        nodes = dict(zip(sizes, slots.split(list(sizes.values())), strict=True))
        rows = [torch.cat([nodes[node] for node in path]) for path in paths]
        self.lengths = [len(row) for row in rows]
        table = torch.zeros((shape.requests, max(self.lengths) + 1), dtype=torch.int32)
        for i, row in enumerate(rows):
            table[i, : len(row)] = row
        self.rows = rows
        self.table = table.to(device)
        self.places = torch.arange(shape.requests, device=device)
        self.new_lens = [min(n, 8) for n in own] if extend else [1] * shape.requests
        pool_shape = (len(slots), shape.heads[1], shape.dim)
        self.keys, self.values = (torch.randn(pool_shape).to(device, dtype) for _ in range(2))
        query = torch.randn(sum(self.new_lens), shape.heads[0], shape.dim)
        self.query = query.to(device, dtype)
        self.cached = [n - new for n, new in zip(self.lengths, self.new_lens, strict=True)]
        self.is_extend = extend

    def levels(self, *, grouped: bool) -> list[Level]:
        """Levels over what is cached; in decode a token's own key is among what it reads alone."""
        ranges = find_shared_ranges(self.table, self.places, self.cached) if grouped else []
        lengths = self.cached if self.is_extend else self.lengths
        return plan_levels(self.table, self.places, ranges, lengths, self.new_lens)

    def new_state(self) -> State | None:
        """In extend, attention of the new tokens to each other, which SGLang's kernel computes."""
        if not self.is_extend:
            return None
        parts = [
            reference.attention(*part, scale=SCALE, causal_from=0)
            for part in self._host(new_only=True)
        ]
        outputs, lses = (torch.cat(list(tensors)) for tensors in zip(*parts, strict=True))
        return outputs.to(self.query), lses.float().to(self.query.device)

    def expected(self) -> torch.Tensor:
        outputs = [
            reference.attention(*part, scale=SCALE, causal_from=len(part[1]) - len(part[0]))[0]
            for part in self._host(new_only=False)
        ]
        return torch.cat(outputs)

    def _host(self, *, new_only: bool) -> Iterator[tuple[torch.Tensor, ...]]:
        queries = self.query.cpu().split(self.new_lens)
        keys, values = self.keys.cpu(), self.values.cpu()
        for row, query in zip(self.rows, queries, strict=True):
            slots = (row[-len(query) :] if new_only else row).long()
            yield query, keys[slots], values[slots]


class TorchLevels:
    """Levels in plain torch, run by run."""

    def plan(self, levels: Sequence[Level], **_dtypes: torch.dtype) -> None:
        self._levels = levels

    def attend(
        self,
        number: int,
        query: torch.Tensor,
        kv_pool: tuple[torch.Tensor, torch.Tensor],
        *,
        scale: float,
    ) -> State:
        level = self._levels[number]
        queries, keys = level.query_starts.tolist(), level.key_starts.tolist()
        outputs, lses = [], []
        for run in range(len(queries) - 1):
            slots = level.slots[keys[run] : keys[run + 1]].long()
            part = query[queries[run] : queries[run + 1]].float()
            group = part.shape[1] // kv_pool[0].shape[1]
            key, value = (pool[slots].float().repeat_interleave(group, dim=1) for pool in kv_pool)
            scores = torch.einsum("qhd,khd->qhk", part, key) * scale
            outputs.append(torch.einsum("qhk,khd->qhd", scores.softmax(-1), value))
            lses.append(scores.logsumexp(-1))
        return torch.cat(outputs), torch.cat(lses)


def make_engine(shape: Shape, device: str) -> tuple[Any, Merge, float]:
    """What computes and merges levels, and the factor of its log-sum-exps on natural ones."""
    if device == "cpu" or importlib.util.find_spec("flashinfer") is None:
        return TorchLevels(), prefix_attention.merge, 1.0
    from rag_radix_kernels.flashinfer_levels import FlashInferLevels, merge

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    heads, kv_heads = shape.heads
    levels = FlashInferLevels(workspace, query_heads=heads, kv_heads=kv_heads, dim=shape.dim)
    return levels, merge, 1.4426950408889634


def runner(batch: Batch, shape: Shape, device: str, *, grouped: bool) -> Callable[[], torch.Tensor]:
    """A layer's attention, planned."""
    engine, merge, lse_factor = make_engine(shape, device)
    levels = batch.levels(grouped=grouped)
    engine.plan(levels, query_dtype=batch.query.dtype, kv_dtype=batch.keys.dtype)
    state = batch.new_state()

    def attend(number: int, query: torch.Tensor) -> State:
        part: State = engine.attend(number, query, (batch.keys, batch.values), scale=SCALE)
        return part

    def run() -> torch.Tensor:
        start = None
        if state is not None:
            output, lse = state
            # Plain torch merges in float32.
            output = output.float() if isinstance(engine, TorchLevels) else output.clone()
            start = output, lse * lse_factor
        return run_levels(batch.query, levels, attend, merge, start)

    return run


def check_attention(device: str) -> Iterator[dict[str, Any]]:
    """Grouped and ungrouped attention against the float64 reference."""
    shapes = CHECKED_ON_CPU if device == "cpu" else CHECKED
    for shape in shapes:
        # Each further pair of type and width is a minute of compiling for FlashInfer, and float32
        # it doesn't have.
        dtypes = [torch.bfloat16, *([torch.float16] if shape.dim == 128 else [])]
        for dtype in [*dtypes, torch.float32] if device == "cpu" else dtypes:
            for kind in ("decode", "extend"):
                batch = Batch(shape, dtype, device, extend=kind == "extend")
                expected = batch.expected()
                for grouped in (True, False):
                    actual = runner(batch, shape, device, grouped=grouped)().double().cpu()
                    error = float((actual - expected).abs().max() / expected.abs().max())
                    yield {
                        "check": f"{kind} {'grouped' if grouped else 'ungrouped'}",
                        "shape": shape.name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "levels": len(batch.levels(grouped=grouped)),
                        "relative_error": error,
                        "limit": MAX_RELATIVE_ERROR[dtype],
                        "passed": error <= MAX_RELATIVE_ERROR[dtype],
                    }


def check_page_copies(device: str) -> Iterator[dict[str, Any]]:
    """Pages to host and back to other slots: every bit, also of NaNs and negative zeros."""
    for page_tokens in (1, 16, 64):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.uint8):
            bits = torch.randint(0, 256, (256 * page_tokens, 4, 64 * dtype.itemsize))
            pool = bits.to(torch.uint8).view(dtype).to(device)
            host = torch.empty_like(pool, device="cpu", pin_memory=device != "cpu")
            pages = torch.randperm(256)[:96]
            offsets = torch.arange(page_tokens)
            source = (pages[:, None] * page_tokens + offsets).flatten()
            target = (pages.roll(17)[:, None] * page_tokens + offsets).flatten()
            copied = torch.empty(
                (len(source), *pool.shape[1:]), dtype=dtype, pin_memory=device != "cpu"
            )
            copied.copy_(pool[source.to(device)], non_blocking=True)
            if device != "cpu":
                torch.cuda.synchronize()
            host[source] = copied
            back = torch.zeros_like(pool)
            back[target.to(device)] = host[source].to(device, non_blocking=True)
            same = torch.equal(
                back[target.to(device)].view(torch.uint8), pool[source.to(device)].view(torch.uint8)
            )
            yield {
                "check": "page copy",
                "shape": f"96 pages of {page_tokens}",
                "dtype": str(dtype).removeprefix("torch."),
                "passed": same,
            }


def time_both(device: str, repeats: int) -> Iterator[dict[str, Any]]:
    """A layer's attention grouped and ungrouped, alternating."""
    for shape in TIMED_ON_CPU if device == "cpu" else TIMED:
        for kind in ("decode", "extend"):
            batch = Batch(shape, torch.bfloat16, device, extend=kind == "extend")
            ways = {way: runner(batch, shape, device, grouped=way == "grouped") for way in WAYS}
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for repeat in range(repeats + 3):
                for way in WAYS if repeat % 2 else WAYS[::-1]:
                    seconds = _seconds(ways[way], device)
                    if repeat >= 3:
                        times[way].append(seconds)
            grouped, ungrouped = (statistics.median(times[way]) for way in WAYS)
            yield {
                "case": f"{kind} {shape.name}",
                "grouped_us": grouped * 1e6,
                "ungrouped_us": ungrouped * 1e6,
                "ratio": ungrouped / grouped,
            }


WAYS = ("grouped", "ungrouped")


def _seconds(run: Callable[[], torch.Tensor], device: str) -> float:
    if device == "cpu":
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _versions(device: str) -> dict[str, Any]:
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "flashinfer"):
        found = importlib.util.find_spec(name) is not None
        versions[name] = (
            getattr(importlib.import_module(name), "__version__", "?") if found else None
        )
    versions["device"] = platform.processor() or platform.machine()
    if device != "cpu":
        versions["device"] = torch.cuda.get_device_name()
        versions["cuda"] = torch.version.cuda
    computed_by_torch = device == "cpu" or versions["flashinfer"] is None
    versions["levels_by"] = "torch" if computed_by_torch else "flashinfer"
    return versions


def main() -> int:
    """Check and time; 0 if all is right, 1 if something isn't, 2 without the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=20, help="of each timing")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA device here; --device cpu runs the same checks on the CPU")
        return 2
    report: dict[str, Any] = {"versions": _versions(options.device)}
    print(report["versions"])
    report["checks"] = []
    for check in (*check_attention(options.device), *check_page_copies(options.device)):
        report["checks"].append(check)
        error = f"{check['relative_error']:.1e}" if "relative_error" in check else "bit for bit"
        verdict = "ok" if check["passed"] else "WRONG"
        print(
            f"{check['check']:<18} {check['shape']:<28} {check['dtype']:<9} {error:<12} {verdict}"
        )
    report["times"] = []
    for timed in time_both(options.device, options.repeats):
        report["times"].append(timed)
        print(
            f"{timed['case']:<42} {timed['grouped_us']:>9.0f} µs grouped "
            f"{timed['ungrouped_us']:>9.0f} µs ungrouped {timed['ratio']:>6.2f}x"
        )
    report["passed"] = all(check["passed"] for check in report["checks"])
    print("all right" if report["passed"] else "SOMETHING IS WRONG, see above")
    print(json.dumps(report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
