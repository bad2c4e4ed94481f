"""A comparison's figures, from its finished trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rag_radix_benchmarks.answers import Agreement, agreement
from rag_radix_benchmarks.limits import Limits
from rag_radix_benchmarks.load import Outcome, Run
from rag_radix_benchmarks.statistics import distribution, paired_ratio
from rag_radix_benchmarks.trials import TrialResult
from rag_radix_benchmarks.workload import Part

# The part of the time to the first token that may be the client's own.
LATE_SHARE_LIMIT = 0.05

HITS = (
    *("token_hit_rate", "device_hit_rate", "host_hit_rate", "document_hit_rate"),
    *("hit_documents", "recomputed_tokens", "share_of_bound"),
)


@dataclass(frozen=True)
class Cell:
    """One arm at one load.

    Attributes:
        results: One for each repeat.
        in_order: Whether its prompts have the documents in the order of the parts, so that a hit
            tells which of them it is of.
    """

    results: tuple[TrialResult, ...]
    in_order: bool = True

    @property
    def runs(self) -> list[Run]:
        return [result.run for result in self.results]

    def figures(self, parts: Sequence[Part], limits: Limits) -> dict[str, Any]:
        """Times in seconds over all repeats; tokens, bytes and scheduling a request."""
        runs = self.runs
        outcomes = [outcome for run in runs for outcome in run.outcomes]
        tpot_s = [each.tpot_s for each in outcomes if each.tpot_s is not None]
        requests = len(outcomes)
        parts_s = self._scheduling_parts_s(requests)
        return {
            "requests": requests,
            "ttft_s": distribution([outcome.ttft_s for outcome in outcomes]),
            "mean_ttft_of_repeats_s": [COMPARED["mean_ttft"](run) for run in runs],
            "tpot_s": distribution(tpot_s) if tpot_s else None,
            "latency_s": distribution([outcome.latency_s for outcome in outcomes]),
            "requests_per_s": requests / math.fsum(run.seconds for run in runs),
            **self._hits(parts, limits),
            "scheduling_s": None if parts_s is None else math.fsum(parts_s.values()),
            "scheduling_parts_s": parts_s,
            "moved_bytes": self._moved(requests),
            "evicted_tokens": self._evicted(requests),
            "search_not_overlapped_s": _mean_search_s(outcomes),
            "client_late_share": late_share(runs),
        }

    def _hits(self, parts: Sequence[Part], limits: Limits) -> dict[str, float | None]:
        """None where they weren't counted, or where nobody knows what they are of."""
        runs = self.runs
        hits: dict[str, float | None] = dict.fromkeys(HITS)
        if not all(run.hits_counted for run in runs):
            return hits
        outcomes = [outcome for run in runs for outcome in run.outcomes]
        prompt_tokens = sum(outcome.prompt_tokens for outcome in outcomes)
        device_tokens = sum(outcome.device_tokens for outcome in outcomes)
        host_tokens = sum(outcome.host_tokens for outcome in outcomes)
        hits |= {
            "token_hit_rate": (device_tokens + host_tokens) / prompt_tokens,
            "device_hit_rate": device_tokens / prompt_tokens,
            "host_hit_rate": host_tokens / prompt_tokens,
            "recomputed_tokens": (prompt_tokens - device_tokens - host_tokens) / len(outcomes),
            "share_of_bound": limits.share_reached(runs),
        }
        if self.in_order:
            found = [documents_found(part, run) for part, run in zip(parts, runs, strict=True)]
            documents = max(sum(each.documents for each in found), 1)
            hits["document_hit_rate"] = sum(each.tokens for each in found) / prompt_tokens
            hits["hit_documents"] = sum(each.whole for each in found) / documents
        return hits

    def _scheduling_parts_s(self, requests: int) -> dict[str, float] | None:
        found = [result.scheduling_parts_s for result in self.results]
        if any(each is None for each in found):
            return None
        parts = found[0] or {}
        return {part: math.fsum(each[part] for each in found if each) / requests for part in parts}

    def _moved(self, requests: int) -> dict[str, float] | None:
        moved = [result.moved for result in self.results]
        if any(each is None for each in moved):
            return None
        return {way: sum(each[way] for each in moved if each) / requests for way in ("out", "in")}

    def _evicted(self, requests: int) -> dict[str, float] | None:
        evicted = [result.evicted_tokens for result in self.results]
        if any(each is None for each in evicted):
            return None
        tiers = evicted[0] or {}
        return {tier: sum(each[tier] for each in evicted if each) / requests for tier in tiers}


def _mean_search_s(outcomes: Sequence[Outcome]) -> float | None:
    seconds = [outcome.search_not_overlapped_s for outcome in outcomes]
    if any(each is None for each in seconds):
        return None
    return math.fsum(each for each in seconds if each) / len(seconds)


@dataclass(frozen=True, slots=True)
class DocumentsFound:
    """Documents that a run found cached.

    Attributes:
        documents: All that were asked for.
        whole: Those found as a whole.
        tokens: Tokens of documents found, those of documents found in part included.
    """

    documents: int
    whole: int
    tokens: int


def documents_found(part: Part, run: Run) -> DocumentsFound:
    """Which documents lay in the cached prefixes of a run's prompts."""
    spans = [
        (document, outcome.hit_tokens)
        for request, outcome in zip(part.measured, run.outcomes, strict=True)
        for document in request.documents
    ]
    return DocumentsFound(
        documents=len(spans),
        whole=sum(document.end <= hit for document, hit in spans),
        tokens=sum(max(min(document.end, hit) - document.start, 0) for document, hit in spans),
    )


def late_share(runs: Sequence[Run]) -> float:
    """Part of the time to the first token that may be the client's own: sent late, or read late."""
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    late_s = math.fsum(outcome.late_s for outcome in outcomes)
    late_s += math.fsum((run.lag_s or 0.0) * len(run.outcomes) for run in runs)
    return late_s / math.fsum(outcome.ttft_s for outcome in outcomes)


# What a run is compared by: all are better when they are lower.
COMPARED: dict[str, Callable[[Run], float]] = {
    "mean_ttft": lambda run: distribution(run.ttft_s)["mean"],
    "p50_ttft": lambda run: distribution(run.ttft_s)["p50"],
    "p90_ttft": lambda run: distribution(run.ttft_s)["p90"],
    "p99_ttft": lambda run: distribution(run.ttft_s)["p99"],
    "mean_latency": lambda run: math.fsum(o.latency_s for o in run.outcomes) / len(run.outcomes),
}


def ratios(cell: Cell, reference: Cell) -> dict[str, Any]:
    """`cell / reference` for each figure compared; above 1, the reference is faster."""
    return {
        name: asdict(paired_ratio(list(map(of, cell.runs)), list(map(of, reference.runs))))
        for name, of in COMPARED.items()
    }


Cells = Mapping[str, Mapping[str, Cell]]
"""By load and arm; every load has the same arms."""


def agreements(cells: Cells, reference: str) -> dict[str, Agreement]:
    """By arm, its answers beside those of the reference, over all loads."""
    arms = [arm for arm in next(iter(cells.values())) if arm != reference]
    return {
        arm: agreement(
            [run for by_arm in cells.values() for run in by_arm[arm].runs],
            [run for by_arm in cells.values() for run in by_arm[reference].runs],
        )
        for arm in arms
    }


def commits(cells: Cells) -> list[str | None]:
    """Those that the runs were measured with."""
    found = {
        result.commit
        for by_arm in cells.values()
        for cell in by_arm.values()
        for result in cell.results
    }
    return sorted(found, key=str)


@dataclass(frozen=True)
class Comparison:
    """All finished trials of a comparison.

    Attributes:
        cells: The trials.
        reference: The arm that the others are divided by.
        parts: What the repeats served.
        limits: What the best cache could do.
    """

    cells: Cells
    reference: str
    parts: Sequence[Part]
    limits: Limits

    def as_json(self) -> dict[str, Any]:
        """Plain values: figures by load and arm, ratios to the reference, the bound, answers."""
        figures = {
            load: {arm: cell.figures(self.parts, self.limits) for arm, cell in cells.items()}
            for load, cells in self.cells.items()
        }
        answers = agreements(self.cells, self.reference)
        late = max(
            of_arm["client_late_share"] for by_arm in figures.values() for of_arm in by_arm.values()
        )
        return {
            "reference": self.reference,
            "loads": figures,
            "ratios": {
                load: {
                    arm: ratios(cell, cells[self.reference])
                    for arm, cell in cells.items()
                    if arm != self.reference
                }
                for load, cells in self.cells.items()
            },
            "bound": self.limits.as_json(),
            "answers": {arm: asdict(each) for arm, each in answers.items()},
            "commits": commits(self.cells),
            "client_kept_up": late <= LATE_SHARE_LIMIT,
            "servers": {
                arm: asdict(cell.results[-1].facts)
                for arm, cell in next(iter(self.cells.values())).items()
            },
            "trees": {
                load: {
                    arm: cell.results[-1].tree
                    for arm, cell in cells.items()
                    if cell.results[-1].tree is not None
                }
                for load, cells in self.cells.items()
            },
        }
