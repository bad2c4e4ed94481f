"""What the tree has done, in SGLang's `/metrics`.

With `--enable-metrics` the scheduler that SGLang lets report writes these series, at most once a
second. No label ever holds what a client chose: there are as many series as there are rows here and
tiers, moves and outcomes, whatever the documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

from rag_radix.policies.base import TierName
from rag_radix.sglang_compat import device_bytes_per_token

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree

_EVERY_S = 1.0
_BUCKETS_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
_TIMED = {
    "match": "match_prefix",
    "publish": "checkpoint_into_tree",
    "evict": "_evict_components",
    "load_back": "init_load_back",
}

Values = Mapping[str, float]
"""By the value of the metric's label; by "" where it has none."""

_Read = Callable[[Any, Mapping[str, Any]], Values]


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series.

    Attributes:
        name: Without the prefix, and without the `_total` that counters end in.
        kind: Whether it only grows.
        meaning: Its help text.
        read: Its values, from the tree and the report of the waiting queue.
        label: Name of its label, if it has one.
    """

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    read: _Read
    label: str | None = None

    @property
    def series(self) -> str:
        """Its name in `/metrics`."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


PREFIX = "rag_radix_"
TIME_METRIC = PREFIX + "tree_seconds"


def _request(field: str) -> _Read:
    return lambda tree, _queue: {"": getattr(tree.counters, field)}


def _found(unit: str, *tiers: str) -> _Read:
    return lambda tree, _queue: {
        tier: getattr(tree.counters, f"{tier}_hit_{unit}") for tier in tiers
    }


def _missed_tokens(tree: Any, _queue: Mapping[str, Any]) -> Values:
    counted = tree.counters
    found = counted.device_hit_tokens + counted.host_hit_tokens + counted.storage_hit_tokens
    return {"": counted.prompt_tokens - found}


def _missed_documents(tree: Any, _queue: Mapping[str, Any]) -> Values:
    counted = tree.counters
    return {"": counted.documents - counted.device_hit_documents - counted.host_hit_documents}


def _evicted(unit: str) -> _Read:
    return lambda tree, _queue: {
        tier.name.name.lower(): getattr(tier, f"evicted_{unit}")
        for tier in (tree.component.device, tree.component.host)
    }


def _moved_tokens(tree: Any, _queue: Mapping[str, Any]) -> Values:
    core = tree.tree_core
    return {"to_host": core.swapped_out_tokens, "to_device": core.loaded_back_tokens}


def _moved_bytes(tree: Any, queue: Mapping[str, Any]) -> Values:
    tokens, per_token = _moved_tokens(tree, queue), device_bytes_per_token(tree)
    return {way: moved * per_token for way, moved in tokens.items()}


def _speculations(tree: Any, _queue: Mapping[str, Any]) -> Values:
    counted = tree.speculations.counters
    outcomes = ("started", "refused", "ended", "promoted", "cancelled")
    return {outcome: getattr(counted, outcome) for outcome in outcomes}


def _cached(tree: Any, _queue: Mapping[str, Any]) -> Values:
    cached = {"device": float(tree.evictable_size() + tree.protected_size())}
    if tree.cache_controller is not None:
        pool = tree.cache_controller.mem_pool_host
        cached["host"] = pool.logical_size - tree.swap_out.host_slots.available_tokens
    return cached


def _capacity(tree: Any, _queue: Mapping[str, Any]) -> Values:
    capacity = {"device": float(tree.token_to_kv_pool_allocator.size)}
    if tree.cache_controller is not None:
        capacity["host"] = tree.cache_controller.mem_pool_host.logical_size
    return capacity


def _documents(tree: Any, _queue: Mapping[str, Any]) -> Values:
    tiers = [TierName.DEVICE] + [TierName.HOST] * (tree.cache_controller is not None)
    return {tier.name.lower(): tree.tree_core.holdings.documents(tier) for tier in tiers}


def _pinned(tree: Any, _queue: Mapping[str, Any]) -> Values:
    return {name: tier["pinned_tokens"] for name, tier in tree.control.pinned().items()}


def _storage(*fields: str) -> _Read:
    """By field, where there is more than one; 0 without files of ours."""

    def read(tree: Any, _queue: Mapping[str, Any]) -> Values:
        report = tree.storing.report() or {}
        return {field if len(fields) > 1 else "": report.get(field, 0) for field in fields}

    return read


def _preloaded(tree: Any, _queue: Mapping[str, Any]) -> Values:
    preloading = tree.storing.preloading
    return {"": 0 if preloading is None else preloading.progress.tokens}


def _invalidated(tree: Any, _queue: Mapping[str, Any]) -> Values:
    return {"": tree.control.invalidated.tokens}


METRICS: tuple[Metric, ...] = (
    Metric("requests", "counter", "Requests counted at their first prefill", _request("requests")),
    Metric(
        "prompt_tokens",
        "counter",
        "Tokens of the prompts of counted requests",
        _request("prompt_tokens"),
    ),
    Metric(
        "hit_tokens",
        "counter",
        "Prompt tokens found",
        _found("tokens", "device", "host", "storage"),
        "tier",
    ),
    Metric("missed_tokens", "counter", "Prompt tokens computed", _missed_tokens),
    Metric("documents", "counter", "Documents that requests named", _request("documents")),
    Metric(
        "hit_documents",
        "counter",
        "Documents found whole; on host when a part of it was there",
        _found("documents", "device", "host"),
        "tier",
    ),
    Metric("missed_documents", "counter", "Documents not found whole", _missed_documents),
    Metric(
        "saved_prefill_seconds",
        "counter",
        "Prefill that hits have saved, by the cost table",
        _request("saved_prefill_s"),
    ),
    Metric("evicted_nodes", "counter", "Nodes that left a tier", _evicted("nodes"), "tier"),
    Metric("evicted_tokens", "counter", "Tokens that left a tier", _evicted("tokens"), "tier"),
    Metric(
        "swapped_out_nodes",
        "counter",
        "Copies made from device to host",
        lambda tree, _queue: {"": tree.tree_core.swapped_out_nodes},
    ),
    Metric("moved_tokens", "counter", "Tokens copied between tiers", _moved_tokens, "way"),
    Metric("moved_bytes", "counter", "Bytes copied between tiers", _moved_bytes, "way"),
    Metric(
        "refused_nodes",
        "counter",
        "Nodes that the policy didn't find worth a copy to host at their eviction",
        _request("refused_nodes"),
    ),
    Metric(
        "refused_tokens",
        "counter",
        "Tokens that the policy didn't find worth a copy to host at their eviction",
        _request("refused_tokens"),
    ),
    Metric(
        "dropped_tail_tokens",
        "counter",
        "Tokens of questions and outputs that left the device without a copy",
        _request("dropped_tail_tokens"),
    ),
    Metric(
        "speculations", "counter", "What became of speculative requests", _speculations, "outcome"
    ),
    Metric(
        "speculation_wasted_tokens",
        "gauge",
        "Tokens computed for speculations that are over and weren't promoted",
        lambda tree, _queue: {"": tree.speculations.counters.wasted_tokens},
    ),
    Metric(
        "held_requests",
        "counter",
        "Requests that waited for a document which another was computing",
        lambda _tree, queue: {"": queue.get("held_requests", 0)},
    ),
    Metric(
        "most_overtakings",
        "gauge",
        "The most requests that one request was overtaken by",
        lambda _tree, queue: {"": queue.get("most_overtakings", 0)},
    ),
    Metric("cached_tokens", "gauge", "Tokens in a tier", _cached, "tier"),
    Metric("cached_documents", "gauge", "Documents in a tier", _documents, "tier"),
    Metric("capacity_tokens", "gauge", "Tokens that a tier can hold", _capacity, "tier"),
    Metric("pinned_tokens", "gauge", "Tokens that pins keep in a tier", _pinned, "tier"),
    Metric("invalidated_tokens", "counter", "Tokens that invalidations dropped", _invalidated),
    Metric(
        "failed_copies",
        "counter",
        "Nodes whose copy to host failed",
        lambda tree, _queue: {"": tree.copy_failures.nodes},
    ),
    Metric("storage_bytes", "gauge", "Bytes that this rank's files take", _storage("bytes")),
    Metric("storage_files", "gauge", "Files of this rank", _storage("files")),
    Metric(
        "storage_written_bytes",
        "counter",
        "Bytes that this rank has written to files",
        _storage("written_bytes"),
    ),
    Metric(
        "storage_pages",
        "counter",
        "Pages written to files, read from them and removed by invalidations",
        _storage("written_pages", "read_pages", "removed_pages"),
        "event",
    ),
    Metric(
        "storage_troubles",
        "counter",
        "Writes that failed, files that were damaged, files that left to keep the budget",
        _storage("failed_writes", "damaged_files", "evicted_files"),
        "event",
    ),
    Metric("preloaded_tokens", "counter", "Tokens loaded from files after a start", _preloaded),
    Metric(
        "known_documents",
        "gauge",
        "Documents whose retrievals are counted, cached or not",
        lambda tree, _queue: {"": len(tree.document_frequencies)},
    ),
    Metric(
        "known_paths",
        "gauge",
        "Paths whose uses are remembered, ghosts included",
        lambda tree, _queue: {"": len(tree.histories)},
    ),
)


def install(scheduler: Any) -> None:
    """Let the tree of `scheduler` report, if SGLang lets this rank."""
    reporter = scheduler.metrics_reporter
    if reporter.enable_metrics and reporter.current_scheduler_metrics_enabled:
        tree, rank = scheduler.tree_cache, data_parallel_rank()
        tree.control.metrics = TreeMetrics(tree, lambda: scheduler.policy.report(), rank)


def data_parallel_rank() -> int:
    """Which of the data-parallel ranks this process belongs to."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # Of data-parallel attention, or of replicas; one of them is 0.
    return int(parallel.attn_dp_rank + (parallel.dp_rank or 0))


class TreeMetrics:
    """The series of one tree, in this process's Prometheus registry.

    Args:
        tree: Its methods are timed from now on.
        queue_report: What the waiting queue says of itself.
        dp_rank: Label of all series.
    """

    def __init__(
        self, tree: KnowledgeTree, queue_report: Callable[[], Mapping[str, Any]], dp_rank: int
    ) -> None:
        # SGLang names the folder for several processes before this may be imported.
        from prometheus_client import Counter, Gauge, Histogram

        self._tree, self._queue_report, self._dp_rank = tree, queue_report, str(dp_rank)
        self._due_s = 0.0
        self._last: dict[tuple[str, str], float] = {}
        self._families: dict[str, Any] = {
            metric.name: (
                Counter(metric.series, metric.meaning, _labels(metric))
                if metric.kind == "counter"
                else Gauge(
                    metric.series, metric.meaning, _labels(metric), multiprocess_mode="mostrecent"
                )
            )
            for metric in METRICS
        }
        times = Histogram(
            TIME_METRIC,
            "Seconds that the scheduler spent in the tree, by operation",
            ["dp_rank", "operation"],
            buckets=_BUCKETS_S,
        )
        for operation, method in _TIMED.items():
            observe = times.labels(self._dp_rank, operation).observe
            setattr(tree, method, _timed(getattr(tree, method), observe))

    def update(self) -> None:
        """Write what has changed, at most once a second."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _EVERY_S
        queue = self._queue_report()
        for metric in METRICS:
            family = self._families[metric.name]
            for label, value in metric.read(self._tree, queue).items():
                series = family.labels(self._dp_rank, *([label] if metric.label else ()))
                if metric.kind == "gauge":
                    series.set(value)
                    continue
                key = metric.name, label
                series.inc(max(value - self._last.get(key, 0.0), 0.0))
                self._last[key] = value


def _labels(metric: Metric) -> list[str]:
    return ["dp_rank", *([metric.label] if metric.label else ())]


def _timed(method: Callable[..., Any], observe: Callable[[float], None]) -> Callable[..., Any]:
    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            observe(time.perf_counter() - started_s)

    return timed
