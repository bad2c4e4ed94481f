"""Do all arms answer the same? A cache may change how fast an answer comes, not the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rag_radix_benchmarks.facts import WrongArmError
from rag_radix_benchmarks.load import Run

# bf16 is not bit-stable between a full and a cached forward, so some answers differ between any
# two servers, and even between two runs of one. This many come from another model.
DIFFERENT_MODEL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Agreement:
    """Answers of an arm beside those of the arm that it is compared with.

    Attributes:
        compared: Requests that both were asked, where both say which tokens they generated.
        different: Of them, those with other output tokens.
        first_tokens_different: Of them, those whose first output token is another one.
    """

    compared: int
    different: int
    first_tokens_different: int


def agreement(theirs: Sequence[Run], ours: Sequence[Run]) -> Agreement:
    """Compare the answers of runs that were asked the same, pair by pair."""
    pairs = [
        (one.output_ids, other.output_ids)
        for their_run, our_run in zip(theirs, ours, strict=True)
        for one, other in zip(their_run.outcomes, our_run.outcomes, strict=True)
        if one.output_ids and other.output_ids
    ]
    return Agreement(
        compared=len(pairs),
        different=sum(one != other for one, other in pairs),
        first_tokens_different=sum(one[:1] != other[:1] for one, other in pairs),
    )


def check_same_model(reference: str, agreements: Mapping[str, Agreement]) -> None:
    """Refuse arms that answer as another model would.

    Args:
        reference: Name of the arm compared with.
        agreements: By the other arm's name.

    Raises:
        WrongArmError: Naming the first such arm.
    """
    for arm, each in agreements.items():
        if each.different > DIFFERENT_MODEL_SHARE * each.compared:
            raise WrongArmError(
                f"{arm} and {reference} answer {each.different} of {each.compared} requests "
                "differently: they can't be serving the same model"
            )
