"""Whether answers are those of a cold cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rag_radix.selftest.prompts import Prompt
from rag_radix.selftest.server import Answer


@dataclass(slots=True)
class Round:
    """Answers got in one way, against those of a cold cache.

    Attributes:
        name: The way.
        equal: Answers with the same tokens.
        close: Answers that go another way where the cold one's two best tokens were within the
            margin; what follows is another text and can't be compared.
        differences: What is wrong with the others.
        device_tokens: Prompt tokens found on the device, of all answers.
        host_tokens: Prompt tokens loaded back from host.
        skipped: Why this way wasn't taken, or "".
    """

    name: str
    equal: int = 0
    close: int = 0
    differences: list[str] = field(default_factory=list)
    device_tokens: int = 0
    host_tokens: int = 0
    skipped: str = ""

    def compare(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Answer],
        cold: Sequence[Answer],
        *,
        margin: float,
    ) -> None:
        """Add the answers to `prompts`, whose cold answers are `cold`."""
        for number, (prompt, answer, wanted) in enumerate(zip(prompts, answers, cold, strict=True)):
            self.device_tokens += answer.device_hit
            self.host_tokens += answer.host_hit
            index = first_difference(answer.tokens, wanted.tokens)
            if index is None:
                self.equal += 1
            elif index < len(wanted.gaps) and wanted.gaps[index] < margin:
                self.close += 1
            else:
                self.differences.append(_difference(number, prompt, answer, wanted, index))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two answers part; None if they are equal."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def _difference(number: int, prompt: Prompt, answer: Answer, wanted: Answer, index: int) -> str:
    hit = f"{answer.device_hit:,} tokens from the device and {answer.host_hit:,} from host"
    if index >= min(len(answer.tokens), len(wanted.tokens)):
        what = f"{len(answer.tokens)} tokens, not {len(wanted.tokens)}"
    else:
        what = (
            f"token {index} is {answer.tokens[index]}, not {wanted.tokens[index]}, whose "
            f"log-probability was {wanted.gaps[index]:.4f} above the second best"
        )
    return f"prompt {number} ({prompt}; {hit}): {what}"
