"""Questions to a real model, with their documents in each order."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import sglang as sgl
from rag_radix_frontend import FaissRetriever, RagEndpoint, build_index, rag_retrieve
from rag_radix_frontend.ordering import Order

from rag_radix.launch import serving
from rag_radix.profile.server import ProfiledServer
from rag_radix_benchmarks.figures import ratios, spread
from rag_radix_benchmarks.python_questions import QUESTIONS, Question, write_reference

ANSWER_TOKENS = 32
INSTRUCTION = "You answer questions about Python. Use the documents. Answer in one short sentence."


@dataclass(frozen=True, slots=True)
class Asked:
    """A question's answer, and how it came."""

    question: Question
    text: str
    ttft_s: float
    cached_tokens: int
    prompt_tokens: int


@sgl.function  # type: ignore[untyped-decorator, unused-ignore]
def _answer(s: Any, retriever: FaissRetriever, question: str, k: int, order: Order) -> None:
    s += sgl.system(INSTRUCTION)
    s += sgl.user(
        rag_retrieve(retriever, question, k=k, order=order, speculative=False)
        + f"Question: {question}"
    )
    s += sgl.assistant(sgl.gen("answer", max_tokens=ANSWER_TOKENS, temperature=0))


def ask_in_orders(options: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Ask all questions in each order, on one server that is emptied in between.

    Within a run every question is asked `--rounds` times, in random order, so that the documents
    of one are found again by others and by itself.
    """
    orders: tuple[Order, ...] = get_args(Order)
    runs: dict[Order, list[list[Asked]]] = {order: [] for order in orders}
    flags = ["--max-total-tokens", str(options.device_tokens), "--log-level", "warning"]
    with (
        tempfile.TemporaryDirectory(prefix="rag-radix-bench-") as folder,
        serving(options.model_path, [*flags, *options.server_flags]) as url,
    ):
        source, index = Path(folder, "reference.jsonl"), Path(folder, "index")
        write_reference(source)
        build_index(source, index)
        retriever = FaissRetriever.open(index)
        retriever.warm_up()
        server, endpoint = ProfiledServer(url), RagEndpoint(url, chat_template_name="chatml")
        for repeat in range(options.repeats):
            questions = list(QUESTIONS) * options.rounds
            random.Random(options.seed + repeat).shuffle(questions)
            for order in orders if repeat % 2 else orders[::-1]:
                server.wait_until_idle()
                server.flush()
                runs[order].append(
                    [_ask(endpoint, retriever, each, options.answer_k, order) for each in questions]
                )
                progress(f"{order}: hit rate {_hit_rate(runs[order][-1]):.1%}")
    return {
        "k": options.answer_k,
        "questions": len(QUESTIONS),
        "orders": {order: _figures(runs[order], runs["score"]) for order in orders},
    }


def _ask(
    endpoint: RagEndpoint, retriever: FaissRetriever, question: Question, k: int, order: Order
) -> Asked:
    started_s = time.perf_counter()
    state = _answer.run(
        retriever=retriever,
        question=question.text,
        k=k,
        order=order,
        backend=endpoint,
        stream=True,
    )
    first_s = None
    for piece in state.text_iter("answer"):
        if piece and first_s is None:
            first_s = time.perf_counter() - started_s
    if error := state.error():
        raise error
    meta = state.get_meta_info("answer")
    return Asked(
        question,
        state["answer"].strip(),
        time.perf_counter() - started_s if first_s is None else first_s,
        meta["cached_tokens"],
        meta["prompt_tokens"],
    )


def _figures(runs: list[list[Asked]], scored: list[list[Asked]]) -> dict[str, Any]:
    pairs = [
        (mine, theirs)
        for run, other in zip(runs, scored, strict=True)
        for mine, theirs in zip(run, other, strict=True)
    ]
    right = [mine.question.expected.lower() in mine.text.lower() for mine, _ in pairs]
    return {
        "token_hit_rate": spread([_hit_rate(run) for run in runs]),
        "mean_ttft_s": spread([_mean_ttft_s(run) for run in runs]),
        "ttft_score_over_this": ratios(
            [_mean_ttft_s(run) for run in scored], [_mean_ttft_s(run) for run in runs]
        ),
        "same_as_score": sum(mine.text == theirs.text for mine, theirs in pairs) / len(pairs),
        "contains_expected": sum(right) / len(right),
    }


def _hit_rate(run: list[Asked]) -> float:
    return sum(asked.cached_tokens for asked in run) / sum(asked.prompt_tokens for asked in run)


def _mean_ttft_s(run: list[Asked]) -> float:
    return sum(asked.ttft_s for asked in run) / len(run)
