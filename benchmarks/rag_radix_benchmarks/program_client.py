"""`rag_retrieve()` programs as the load of a comparison."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sglang as sgl
from rag_radix_frontend import RagEndpoint, Retriever, rag_retrieve

from rag_radix_benchmarks.arms import Arm, ProgramStyle
from rag_radix_benchmarks.corpus import INSTRUCTION, CorpusPrograms, question_text
from rag_radix_benchmarks.load import LoadError, Outcome, Run
from rag_radix_benchmarks.piecewise_endpoint import PiecewiseEndpoint


@sgl.function  # type: ignore[untyped-decorator, unused-ignore]
def _answer(
    s: Any,
    retriever: Retriever,
    query: str,
    text: str,
    k: int,
    tokens: int,
    style: ProgramStyle,
) -> None:
    s += INSTRUCTION
    s += rag_retrieve(retriever, query, k=k, speculative=style.speculation, order=style.order)
    s += text
    s += sgl.gen("answer", max_tokens=tokens, temperature=0, ignore_eos=True)


class ProgramClient:
    """Runs the programs of a workload on a server, each on a thread of its own.

    Args:
        url: Of the server.
        workload: What the programs ask.
        arm: Whose programs these are.
    """

    def __init__(self, url: str, workload: CorpusPrograms, arm: Arm) -> None:
        self._endpoint = (
            RagEndpoint(url)
            if arm.built["cache"] == "KnowledgeTree"
            else PiecewiseEndpoint(url, workload.tokenizer)
        )
        self._workload = workload
        self._style = arm.programs

    def open_loop(self, questions: Sequence[tuple[int, str]], due_s: Sequence[float]) -> Run:
        """Start each program when it is due.

        Raises:
            LoadError: One of them fails.
        """
        return self._run(questions, due_s, workers=len(questions))

    def closed_loop(self, questions: Sequence[tuple[int, str]], concurrency: int) -> Run:
        """Keep `concurrency` programs under way.

        Raises:
            LoadError: One of them fails.
        """
        return self._run(questions, None, workers=concurrency)

    def _run(
        self,
        questions: Sequence[tuple[int, str]],
        due_s: Sequence[float] | None,
        workers: int,
    ) -> Run:
        retriever = self._workload.retriever([query for _, query in questions])
        started_s = time.perf_counter()

        def ask(position: int) -> tuple[float, Outcome]:
            due = time.perf_counter() - started_s
            if due_s is not None:
                due = due_s[position]
                time.sleep(max(0.0, started_s + due - time.perf_counter()))
            return due, self._ask(retriever, *questions[position], started_s + due)

        with ThreadPoolExecutor(workers) as threads:
            asked = list(threads.map(ask, range(len(questions))))
        seconds = time.perf_counter() - started_s
        due, outcomes = zip(*asked, strict=True)
        return Run(outcomes, due, seconds)

    def _ask(self, retriever: Retriever, number: int, query: str, due_s: float) -> Outcome:
        late_s = time.perf_counter() - due_s
        state = _answer.run(
            retriever=retriever,
            query=query,
            text=question_text(number, query),
            k=self._workload.k,
            tokens=self._workload.output_tokens,
            style=self._style,
            backend=self._endpoint,
            stream=True,
        )
        first_s = None
        for piece in state.text_iter("answer"):
            if piece and first_s is None:
                first_s = time.perf_counter() - due_s
        latency_s = time.perf_counter() - due_s
        if error := state.error():
            raise LoadError(f"a program failed: {error!r}") from error
        meta, retrieval = state.get_meta_info("answer"), state.get_meta_info("docs")
        details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"], "host": 0}
        return Outcome(
            # A token may be half a character, so that an answer may have no text at all.
            ttft_s=latency_s if first_s is None else first_s,
            latency_s=latency_s,
            late_s=late_s,
            prompt_tokens=meta["prompt_tokens"],
            device_tokens=details["device"],
            host_tokens=details["host"],
            output_tokens=meta["completion_tokens"],
            output_ids=self._workload.tokens(state["answer"]),
            search_not_overlapped_s=retrieval.search_not_overlapped_s,
        )
