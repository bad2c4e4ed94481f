"""What the best possible cache could do with the requests of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_radix.cost_model import PrefillCostTable, default_cost_table
from rag_radix.replay.bound import Bound, clairvoyant_bound
from rag_radix.replay.trace import TraceRequest
from rag_radix_benchmarks.load import Run
from rag_radix_benchmarks.setup import Setup
from rag_radix_benchmarks.workload import Part

Cost = Callable[[int, int], float]


def prefill_cost(model_path: str, cost_table: Path | None) -> PrefillCostTable:
    """A profile, or an estimate from the model's shape, of which only ratios mean anything.

    Raises:
        ConfigError: The profile can't be used.
    """
    if cost_table is not None:
        return PrefillCostTable.load(cost_table)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    return default_cost_table(
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        context_tokens=config.max_position_embeddings,
    )


@dataclass(frozen=True, slots=True)
class UsedText:
    """What a cache that drops nothing holds after some requests.

    Attributes:
        document_tokens: Documents, once behind each text that they stood behind.
        all_tokens: These, template text, questions and answers.
    """

    document_tokens: int
    all_tokens: int

    @classmethod
    def of(cls, requests: Sequence[TraceRequest]) -> UsedText:
        """Of a trace, whose questions and answers are never the same twice."""
        places: set[tuple[Any, ...]] = set()
        documents = beside = 0
        for request in requests:
            place: tuple[Any, ...] = ()
            end = 0
            for each in request.documents:
                template = (*place, request.namespace_at(end), each.start - end)
                place = (*template, request.namespace_at(each.start), each.id, each.version)
                beside += 0 if template in places else each.start - end
                documents += 0 if place in places else each.end - each.start
                places |= {template, place}
                end = each.end
            beside += request.prompt_tokens - end + request.output_tokens
        return cls(documents, documents + beside)


@dataclass(frozen=True)
class Limits:
    """The clairvoyant bound of each repeat.

    It holds for requests served in the order of the trace, with loads from host taken as free,
    which only raises it. A server that reorders its queue may exceed it.

    Attributes:
        bounds: By repeat.
        unlimited: By repeat, the same with memory for everything.
        used: By repeat, the text that it used, warm-up included.
        tier_tokens: That both tiers hold together.
        cost: Prefill cost behind the bounds.
    """

    bounds: tuple[Bound, ...]
    unlimited: tuple[Bound, ...]
    used: tuple[UsedText, ...]
    tier_tokens: int
    cost: Cost

    @classmethod
    def of(cls, parts: Sequence[Part], setup: Setup, cost: Cost) -> Limits:
        """Bound caches of both tiers of `setup`."""

        def bounds(device_tokens: Callable[[Part], int], host_tokens: int) -> tuple[Bound, ...]:
            return tuple(
                clairvoyant_bound(
                    part.warm_up + part.measured,
                    device_tokens=device_tokens(part),
                    host_tokens=host_tokens,
                    cost=cost,
                    load_s_per_token=0.0,
                    warm_up=len(part.warm_up),
                )
                for part in parts
            )

        return cls(
            bounds=bounds(lambda part: setup.device_tokens, setup.host_tokens),
            unlimited=bounds(
                lambda part: sum(each.prompt_tokens for each in part.warm_up + part.measured), 0
            ),
            used=tuple(UsedText.of(part.warm_up + part.measured) for part in parts),
            tier_tokens=setup.device_tokens + setup.host_tokens,
            cost=cost,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values: both bounds, and what a repeat used at most beside what the tiers hold."""
        return {
            "document_hit_rate": _hit_rate(self.bounds),
            "saved_share": self.saved_share,
            "unlimited": {
                "document_hit_rate": _hit_rate(self.unlimited),
                "saved_share": _saved_share(self.unlimited),
            },
            "used_tokens": {
                "documents": max(used.document_tokens for used in self.used),
                "all": max(used.all_tokens for used in self.used),
            },
            "tier_tokens": self.tier_tokens,
        }

    @property
    def saved_share(self) -> float:
        """Part of the prefill time that can be saved at most."""
        return _saved_share(self.bounds)

    def share_reached(self, runs: Sequence[Run]) -> float | None:
        """How much of the possible saving an arm's hits are worth; None where there is none.

        Args:
            runs: Of the arm, by repeat.
        """
        possible_s = math.fsum(bound.saved_s for bound in self.bounds)
        computed_s = math.fsum(
            self.cost(outcome.hit_tokens, outcome.prompt_tokens - outcome.hit_tokens)
            for run in runs
            for outcome in run.outcomes
        )
        uncached_s = math.fsum(bound.uncached_s for bound in self.bounds)
        return (uncached_s - computed_s) / possible_s if possible_s else None


def _hit_rate(bounds: Sequence[Bound]) -> float:
    """Cached document tokens by prompt tokens, mean over repeats."""
    return math.fsum(bound.hit_rate for bound in bounds) / len(bounds)


def _saved_share(bounds: Sequence[Bound]) -> float:
    uncached_s = math.fsum(bound.uncached_s for bound in bounds)
    return math.fsum(bound.saved_s for bound in bounds) / uncached_s


# Bounds that differ by less are the same: that of time is found by subgradient steps.
_SAME = 1e-3


def memory_words(bound: Mapping[str, Any]) -> str:
    """How far the memory was a limit, a sentence or two.

    Args:
        bound: As of `Limits.as_json`.
    """
    unlimited, used = bound["unlimited"], bound["used_tokens"]
    tiers = bound["tier_tokens"]
    words = (
        f"With all documents kept, at most {unlimited['saved_share']:.1%} of the prefill time "
        "could be saved"
    )
    if used["all"] <= tiers:
        return (
            f"{words}: both tiers, of {tiers:,} tokens, hold all that a run used, {used['all']:,} "
            "tokens with its questions. Nothing has to leave them, so this run can't tell policies "
            "apart."
        )
    if used["documents"] <= tiers:
        return (
            f"{words}: both tiers, of {tiers:,} tokens, hold all documents that a run used, "
            f"{used['documents']:,} tokens, though not its questions beside them. This run can't "
            "tell policies apart by which documents they keep."
        )
    words += f"; a run used {used['documents']:,} tokens of documents, both tiers hold {tiers:,}"
    if unlimited["saved_share"] - bound["saved_share"] <= _SAME * unlimited["saved_share"]:
        return (
            f"{words}, enough for all that are asked for again: policies can differ only by what "
            "they keep for nothing."
        )
    return f"{words}."
