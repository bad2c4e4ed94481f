"""The ways in which a prompt can be answered, each compared with a cold cache."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from rag_radix.selftest.comparison import Round
from rag_radix.selftest.prompts import Prompt
from rag_radix.selftest.server import Answer

CONCURRENCY = 12
# A policy may keep what is asked often: so many device tiers are computed besides, at most.
MOST_FILLS = 6
FILL_PROMPT_TOKENS = 2000


class Server(Protocol):
    """What is asked of a server; `TestedServer` is one."""

    def answer(self, prompt: Prompt, namespace: str) -> Answer: ...

    def compute(self, prompt: Sequence[int], namespace: str) -> None: ...


def run_rounds(
    server: Server,
    prompts: Sequence[Prompt],
    *,
    margin: float,
    device_tokens: int,
    prompt_tokens: int,
    has_host_tier: bool,
    vocabulary: Sequence[int],
    fill_limit_s: float,
    on_round: Callable[[Round], None] = lambda _: None,
    on_fill: Callable[[float], None] = lambda _: None,
) -> list[Round]:
    """Ask every prompt in every way.

    Args:
        server: Is asked.
        prompts: What is asked.
        margin: See `Round`.
        device_tokens: Size of the device tier.
        prompt_tokens: Longest prompt the server takes.
        has_host_tier: Whether prefixes can go to host.
        vocabulary: Token ids for prompts that push others out.
        fill_limit_s: For how long they are computed at most.
        on_round: Called with each round that has ended.
        on_fill: Called with the seconds that filling the device tier once will take.
    """
    rng = random.Random(0)
    run = uuid.uuid4().hex
    shared = f"{run}-shared"
    cold = [server.answer(p, f"{run}-cold-{i}") for i, p in enumerate(prompts)]
    rounds = []

    def end(round_: Round, *answers: Sequence[Answer]) -> None:
        for batch in answers:
            round_.compare(prompts, batch, cold, margin=margin)
        rounds.append(round_)
        on_round(round_)

    def alone(namespace: str) -> list[Answer]:
        return [server.answer(prompt, namespace) for prompt in prompts]

    def together(namespace: str) -> list[Answer]:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(lambda prompt: server.answer(prompt, namespace), prompts))

    end(
        Round("cold again"),
        [server.answer(p, f"{run}-again-{i}") for i, p in enumerate(prompts)],
    )
    end(Round("behind cached documents"), alone(shared))
    end(Round("cached as a whole"), alone(shared))
    end(Round("many at once, cold"), together(f"{run}-burst"))
    end(Round("many at once, cached"), together(shared), together(shared))
    from_host = Round("loaded back from host")
    if not has_host_tier:
        from_host.skipped = "the server has no host tier"
        end(from_host)
        return rounds
    size = min(FILL_PROMPT_TOKENS, prompt_tokens, device_tokens // 4)
    start = time.monotonic()
    for fill in range(MOST_FILLS):
        for n in range(device_tokens // size + 1):
            server.compute(rng.choices(vocabulary, k=size), f"{shared}-fill")
            if fill == n == 0:
                fill_s = (time.monotonic() - start) * device_tokens / size
                on_fill(fill_s)
            left_s = start + fill_limit_s - time.monotonic()
            if left_s < 0 or fill_s > fill_limit_s:
                from_host.skipped = (
                    f"filling the device tier of {device_tokens:,} tokens takes {fill_s:.0f} s, "
                    f"maybe more than once, and --fill-seconds is {fill_limit_s:g}"
                )
                end(from_host)
                return rounds
        answers = alone(shared)
        if any(answer.host_hit for answer in answers):
            end(from_host, answers)
            return rounds
    from_host.skipped = "nothing was loaded back, however much was computed besides"
    end(from_host)
    return rounds
