"""The self-test against servers that answer right and wrong."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rag_radix.selftest.comparison import Round, first_difference
from rag_radix.selftest.prompts import Prompt, make_prompts
from rag_radix.selftest.rounds import run_rounds
from rag_radix.selftest.server import Answer

TEXT = [i * 7919 % 5000 for i in range(20000)]
PROMPTS = make_prompts(TEXT, 12, page_tokens=16, limit_tokens=4000, seed=0)


class FakeServer:
    """Answers are a function of the prompt, unless `spoil` changes what comes from a cache."""

    def __init__(self, spoils: str = "", *, gap: float = 1.0) -> None:
        self.spoils = spoils
        self.gap = gap
        self.device: dict[str, list[tuple[int, ...]]] = {}
        self.on_host: set[str] = set()
        self.lock = threading.Lock()

    def answer(self, prompt: Prompt, namespace: str) -> Answer:
        with self.lock:
            known = self.device.setdefault(namespace, [])
            hit = max((_common(prompt.tokens, other) for other in known), default=0)
            known.append(prompt.tokens)
        tokens = tuple((sum(prompt.tokens) + i) % 1000 for i in range(16))
        from_host = namespace in self.on_host
        if hit and (self.spoils == "cached" or (self.spoils == "host" and from_host)):
            tokens = (*tokens[:5], 1001, *tokens[6:])
        host = hit if from_host else 0
        return Answer(tokens, (self.gap,) * 16, hit - host, host)

    def compute(self, prompt: Sequence[int], namespace: str) -> None:
        self.on_host.add(namespace.removesuffix("-fill"))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def rounds_of(server: FakeServer, **options: object) -> dict[str, Round]:
    settings = {
        "margin": 0.0,
        "device_tokens": 4096,
        "prompt_tokens": 1000,
        "has_host_tier": True,
        "vocabulary": TEXT[:100],
        "fill_limit_s": 60,
    }
    return {r.name: r for r in run_rounds(server, PROMPTS, **settings | options)}


def test_a_right_server_has_no_differences_in_any_way_of_being_cached() -> None:
    rounds = rounds_of(FakeServer())
    assert not any(r.differences or r.skipped for r in rounds.values())
    assert rounds["cold again"].device_tokens == 0
    assert rounds["cached as a whole"].device_tokens > 5000
    assert rounds["loaded back from host"].host_tokens > 5000
    assert rounds["many at once, cached"].equal == 2 * len(PROMPTS)


@pytest.mark.parametrize(
    ("spoils", "first"),
    [("cached", "behind cached documents"), ("host", "loaded back from host")],
)
def test_the_first_difference_says_which_token_of_which_prompt(spoils: str, first: str) -> None:
    rounds = rounds_of(FakeServer(spoils))
    wrong = [r for r in rounds.values() if r.differences]
    assert wrong[0].name == first
    assert "token 5 is 1001, not" in wrong[0].differences[0]
    assert "documents selftest/" in wrong[0].differences[0]


def test_a_token_within_the_margin_of_the_second_best_may_differ() -> None:
    rounds = rounds_of(FakeServer("cached", gap=0.3), margin=0.5)
    assert not any(r.differences for r in rounds.values())
    assert rounds["cached as a whole"].close == len(PROMPTS)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"has_host_tier": False}, "no host tier"),
        ({"fill_limit_s": 0}, "--fill-seconds is 0"),
    ],
)
def test_what_cannot_be_tested_says_why(options: dict[str, object], reason: str) -> None:
    round_ = rounds_of(FakeServer(), **options)["loaded back from host"]
    assert reason in round_.skipped
    assert round_.equal == 0


def test_a_server_that_never_loads_back_is_not_taken_for_tested() -> None:
    server = FakeServer()
    server.compute = lambda prompt, namespace: None  # type: ignore[method-assign]
    assert "nothing was loaded back" in rounds_of(server)["loaded back from host"].skipped


def test_what_filling_takes_is_told_before_it_is_done() -> None:
    told: list[float] = []
    server = FakeServer()
    computed: list[str] = []
    server.compute = lambda prompt, namespace: computed.append(namespace)  # type: ignore[method-assign]
    rounds_of(server, fill_limit_s=0, on_fill=told.append)
    assert len(told) == len(computed) == 1


def test_an_answer_that_ends_early_differs() -> None:
    answer = Answer((1, 2), (1.0, 1.0), 0, 0)
    round_ = Round("any")
    round_.compare(PROMPTS[:1], [answer], [replace(answer, tokens=(1, 2, 3))], margin=0.5)
    assert "2 tokens, not 3" in round_.differences[0]
    assert first_difference((1, 2), (1, 2)) is None


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("limit_tokens", [300, 4000])
def test_prompts_share_documents_and_fit(page_tokens: int, limit_tokens: int) -> None:
    prompts = make_prompts(TEXT, 24, page_tokens=page_tokens, limit_tokens=limit_tokens, seed=1)
    assert len(prompts) == 24
    assert len({p.tokens for p in prompts}) == 24
    assert len({p.documents for p in prompts}) <= 4
    for prompt in prompts:
        assert len(prompt.tokens) <= limit_tokens
        for (_, start, end), (_, next_start, _) in zip(
            prompt.documents, prompt.documents[1:], strict=False
        ):
            assert start < end <= next_start
