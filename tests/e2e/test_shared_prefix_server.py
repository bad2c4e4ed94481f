"""Reading shared prefixes once changes no answer: servers with and without it, under load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pydoc_data.topics import topics
from typing import Any

import pytest
from e2e.cpu_server import Server, running_server
from e2e.exactness import BF16_MARGIN, MODEL, Reference, assert_intact, differs, reference_of
from rag_radix_kernels.options import SHARED_PREFIX
from transformers import AutoTokenizer

pytestmark = [pytest.mark.server, pytest.mark.slow]

CONCURRENCY = 12
SETUPS = {
    "paged-chunked-overlap": ("float32", ("--page-size", "16", "--chunked-prefill-size", "256")),
    "unpaged-mixed-chunks": (
        "float32",
        ("--chunked-prefill-size", "192", "--enable-mixed-chunk", "--disable-overlap-schedule"),
    ),
    "bf16": ("bfloat16", ("--page-size", "16", "--chunked-prefill-size", "256")),
}


def requests() -> list[dict[str, Any]]:
    """Questions on few paths, some equal, some alone, that end at different times."""
    rng = random.Random(3)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    names = sorted(topics)
    texts = [ids(topics[name]) for name in names]
    documents = [text[: 350 + 41 * i] for i, text in enumerate(t for t in texts if len(t) > 700)]
    system = ids("Answer from these passages.\n\n")
    paths = [[0, 1], [0, 1, 2], [0, 3], [4], [4, 5, 0]]
    bodies = []
    for number in range(40):
        path = [rng.randrange(6, len(documents))] if number % 8 == 7 else rng.choice(paths)
        text = f"\nWhat do the passages say about {rng.choice(names)}?\nAnswer:"
        bodies.append(
            {
                "input_ids": system + [t for d in path for t in documents[d]] + ids(text),
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": rng.choice([1, 6, 12, 24]),
                    "ignore_eos": True,
                    "n": 2 if number % 10 == 3 else 1,
                },
            }
        )
    return bodies


def answers(server: Server, bodies: Sequence[dict[str, Any]], **fields: Any) -> list[list[Any]]:
    """For each request its replies, one for each of its `n`."""

    def ask(body: dict[str, Any]) -> list[Any]:
        reply = server.generate(**body, **fields)
        return reply if isinstance(reply, list) else [reply]

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(ask, bodies))


@pytest.mark.parametrize("setup", SETUPS)
def test_answers_with_and_without_grouping_are_equal_on_a_mixed_load(setup: str) -> None:
    dtype, more = SETUPS[setup]
    flags = ["--radix-cache-backend", "knowledge-tree", "--attention-backend", "rag_prefix"]
    flags += ["--max-total-tokens", "24000", "--dtype", dtype, *more]
    bodies = requests()
    with running_server(MODEL, *flags, env={SHARED_PREFIX: "0"}) as ungrouped:
        replies = answers(
            ungrouped, bodies, return_logprob=True, top_logprobs_num=2, logprob_start_len=-1
        )
        assert "once for all of them" not in ungrouped.log()
    expected: list[list[Reference]] = [
        [reference_of(reply["meta_info"]) for reply in of_one] for of_one in replies
    ]
    margin = BF16_MARGIN if dtype == "bfloat16" else 0.0
    wrong = []
    with running_server(MODEL, *flags) as grouped:
        for attempt in ("cold", "cached"):
            for number, of_one in enumerate(answers(grouped, bodies)):
                for reply, wanted in zip(of_one, expected[number], strict=True):
                    problem = differs(reply["output_ids"], wanted, margin=margin)
                    if problem or len(reply["output_ids"]) != len(wanted.tokens):
                        wrong.append(f"{attempt}, request {number}: {problem}")
        assert "once for all of them" in grouped.log()
        assert_intact(grouped)
    assert not wrong
