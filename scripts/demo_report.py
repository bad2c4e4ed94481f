"""How the demo shows an answer, the table of all answers, and what the tree has done."""

from __future__ import annotations

import shutil
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BAR_CELLS = 20
LABEL_CELLS = 12


@dataclass(frozen=True)
class Retrieved:
    """A document the question was answered from."""

    id: str
    score: float


@dataclass(frozen=True)
class Answer:
    """A question, what was found for it, and where the tokens of its prompt came from."""

    question: str
    documents: tuple[Retrieved, ...]
    text: str
    finished: bool
    ttft_s: float
    device_tokens: int
    host_tokens: int
    prompt_tokens: int

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.device_tokens - self.host_tokens


def show_answer(number: int, answer: Answer) -> None:
    """Print one answer with its documents and costs."""
    width = terminal_width()
    question = textwrap.fill(answer.question, width - 4, subsequent_indent=4 * " ")
    print(f"\n{number:2}. {bold(question)}")
    found = ", ".join(f"{doc.id} ({doc.score:.2f})" for doc in answer.documents)
    show_field("documents", found, width)
    show_field("answer", answer.text + ("" if answer.finished else " ..."), width)
    show_field("first token", f"{answer.ttft_s:.2f} s", width)
    parts = (
        f"{answer.device_tokens} GPU + {answer.host_tokens} host + "
        f"{answer.computed_tokens} computed"
    )
    show_field("tokens", f"{bar(answer)}  {answer.prompt_tokens} = {parts}", width)
    sys.stdout.flush()


def show_summary(answers: Sequence[Answer]) -> None:
    """Print a line per answer and the totals."""
    cells = min(44, max(24, terminal_width() - 52))
    heads = f"{'TTFT':>7}  {'GPU':>6}  {'host':>6}  {'computed':>8}  {'cached':>6}"
    print(f"\n{'':4}{'question':{cells}}  {heads}")
    for number, answer in enumerate(answers, 1):
        show_row(f"{number:2}", answer.question, cells, answer.ttft_s, [answer])
    mean_s = sum(answer.ttft_s for answer in answers) / len(answers)
    show_row("", "all (mean TTFT)", cells, mean_s, answers)
    show_gain(answers)


def show_row(number: str, label: str, cells: int, ttft_s: float, answers: Sequence[Answer]) -> None:
    device = sum(answer.device_tokens for answer in answers)
    host = sum(answer.host_tokens for answer in answers)
    prompt = sum(answer.prompt_tokens for answer in answers)
    label = textwrap.shorten(label, cells, placeholder=" ...")
    print(
        f"{number:4}{label:{cells}}  {ttft_s:5.2f} s  {device:6,}  {host:6,}  "
        f"{prompt - device - host:8,}  {(device + host) / prompt:6.0%}"
    )


def show_gain(answers: Sequence[Answer]) -> None:
    """Print what caching was worth, when there are answers of both kinds to compare."""
    warm = [one.ttft_s for one in answers if one.computed_tokens * 2 <= one.prompt_tokens]
    cold = [one.ttft_s for one in answers if one.computed_tokens * 2 > one.prompt_tokens]
    if warm and cold:
        print(
            f"\nMedian time to first token: {statistics.median(warm):.2f} s where half of the "
            f"prompt or more\nwas cached ({len(warm)} of {len(answers)}), "
            f"{statistics.median(cold):.2f} s for the others."
        )


def show_stats(stats: dict[str, Any], *, has_gpu: bool) -> None:
    """Print the tree's own report: tiers, evictions and copies."""
    device, host, swap = stats["device"], stats["host"], stats["swap"]
    width = terminal_width()
    note = "" if has_gpu else "; no GPU here, so its GPU tier is in main memory as well"
    print(f"\n{bold('The knowledge tree')} (policy {stats['policy']}{note})")
    for label, tier in (("GPU tier", device), ("host tier", host)):
        show_field(
            label,
            f"{tier['cached_tokens']:,} of {tier['capacity_tokens']:,} tokens in use, "
            f"{tier['documents']} documents, {tier['evicted_tokens']:,} tokens evicted",
            width,
        )
    copies, most = f"{swap['out_tokens']:,} tokens to host", swap["most_copies_of_a_node"]
    if most:
        often = "once" if most == 1 else f"{most} times"
        copies += f" ({swap['out_bytes'] / 1e6:.1f} MB, no node more than {often})"
    show_field("copies", f"{copies}, {swap['in_tokens']:,} back to the GPU tier", width)


def show_field(label: str, text: str, width: int) -> None:
    indent = " " * (4 + LABEL_CELLS)
    print(
        textwrap.fill(
            " ".join(text.split()) if label != "tokens" else text,
            width,
            initial_indent=f"    {label:{LABEL_CELLS}}",
            subsequent_indent=indent,
            break_long_words=False,
        )
    )


def bar(answer: Answer) -> str:
    """The prompt as a strip: full cells came from GPU, half from host, dots were computed."""
    full, half, empty = "█▒·" if can_print("█▒·") else "#=."
    on_device = round(BAR_CELLS * answer.device_tokens / answer.prompt_tokens)
    cached = round(BAR_CELLS * (answer.device_tokens + answer.host_tokens) / answer.prompt_tokens)
    return full * on_device + half * (cached - on_device) + empty * (BAR_CELLS - cached)


def can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


def terminal_width() -> int:
    return max(72, min(100, shutil.get_terminal_size((96, 24)).columns))
