"""What the best possible cache could do with the requests of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rag_radix.cost_model import PrefillCostTable, default_cost_table
from rag_radix.replay.bound import Bound, clairvoyant_bound
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


@dataclass(frozen=True)
class Limits:
    """The clairvoyant bound of each repeat.

    It holds for requests served in the order of the trace, with loads from host taken as free,
    which only raises it. A server that reorders its queue may exceed it.

    Attributes:
        bounds: By repeat.
        cost: Prefill cost behind them.
    """

    bounds: tuple[Bound, ...]
    cost: Cost

    @classmethod
    def of(cls, parts: Sequence[Part], setup: Setup, cost: Cost) -> Limits:
        """Bound caches of both tiers of `setup`."""
        return cls(
            tuple(
                clairvoyant_bound(
                    part.warm_up + part.measured,
                    device_tokens=setup.device_tokens,
                    host_tokens=setup.host_tokens,
                    cost=cost,
                    load_s_per_token=0.0,
                    warm_up=len(part.warm_up),
                )
                for part in parts
            ),
            cost,
        )

    @property
    def document_hit_rate(self) -> float:
        """Cached document tokens by prompt tokens, mean over repeats."""
        return math.fsum(bound.hit_rate for bound in self.bounds) / len(self.bounds)

    @property
    def saved_share(self) -> float:
        """Part of the prefill time that can be saved at most."""
        uncached_s = math.fsum(bound.uncached_s for bound in self.bounds)
        return math.fsum(bound.saved_s for bound in self.bounds) / uncached_s

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
