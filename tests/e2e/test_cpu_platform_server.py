"""The CPU platform under the real SGLang server, with a tiny model of random weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from e2e.cpu_server import Server, ServerError, running_server
from e2e.tiny_model import make_tiny_llama
from transformers import LlamaForCausalLM

from rag_radix.cpu_platform import activate

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(activate() is None, reason="this machine has an accelerator"),
]

OUTPUT_TOKENS = 12
COMMON = ("--dtype", "float32", "--skip-tokenizer-init", "--log-level", "info")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts that share prefixes and end around pages, chunks and each other."""
    numbers = random.Random(0)
    system = numbers.choices(range(10, 512), k=50)
    documents = [numbers.choices(range(10, 512), k=n) for n in (300, 16, 511, 31)]
    orders = [(0,), (0, 1), (0, 2), (3, 2), (2, 0, 1), (1,), (0, 1, 3)]
    return [
        [*system, *(token for d in order for token in documents[d]), 7, 8, len(order)]
        for order in orders
    ]


@pytest.fixture(scope="module")
def expected(tiny_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What Transformers answers, which caches nothing here."""
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.inference_mode():
            while len(tokens) < len(prompt) + OUTPUT_TOKENS:
                output = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1)
                tokens.append(int(output.logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def _answer(server: Server, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
    reply = server.generate(
        input_ids=prompt,
        sampling_params={"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True},
    )
    return reply["output_ids"], reply["meta_info"]


def _assert_same_answers(
    server: Server, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for round_ in range(2):
        for prompt, output in zip(prompts, expected, strict=True):
            answer, meta = _answer(server, prompt)
            assert answer == output
            if round_ == 1:
                assert meta["cached_tokens"] > 0


def _answer_batch(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    replies = server.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True},
    )
    return [reply["output_ids"] for reply in replies]


def test_a_server_without_any_flag_of_ours_answers_like_transformers(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with running_server(tiny_model, *COMMON) as server:
        info = server.get("/server_info")
        assert info["device"] == "cpu"
        assert info["attention_backend"] == "rag_prefix"
        assert not info["disable_overlap_schedule"]
        _assert_same_answers(server, prompts, expected)
        server.flush_cache()
        assert _answer_batch(server, prompts) == expected
        processes = psutil.Process(server.pid).children(recursive=True)
        assert processes
    assert not [process for process in processes if process.is_running()]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--page-size", "16", "--chunked-prefill-size", "128"), id="page-16-chunks"),
        pytest.param(
            ("--page-size", "1", "--disable-overlap-schedule"),
            id="page-1-no-overlap",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stock_hierarchical_cache_answers_from_host_memory_without_a_changed_token(
    flags: tuple[str, ...],
    tiny_model: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    flags += ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", "1200")
    with running_server(tiny_model, *COMMON, *flags) as server:
        from_host = 0
        for _ in range(3):
            for prompt, output in zip(prompts, expected, strict=True):
                answer, meta = _answer(server, prompt)
                assert answer == output
                from_host += (meta["cached_tokens_details"] or {}).get("host", 0)
        assert from_host > 0
        server.flush_cache()
        assert _answer_batch(server, prompts) == expected


def test_a_start_that_fails_shows_the_log(tiny_model: Path) -> None:
    flags = ("--enable-hierarchical-cache", "--hicache-mem-layout", "page_head")
    with (
        pytest.raises(ServerError, match="--hicache-mem-layout page_head needs a GPU"),
        running_server(tiny_model, *COMMON, *flags),
    ):
        pass
