"""A load of `rag_retrieve()` programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import sglang as sgl
from rag_radix_frontend import RagEndpoint, Retriever, rag_retrieve
from rag_radix_frontend.retrieval_report import RetrievalReport

from rag_radix_benchmarks.questions import words

INSTRUCTION = "Answer the question from the documents.\n\n"
QUESTION_WORDS = 12


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """How one program went.

    Attributes:
        ttft_s: From when it was due, its search included, to its answer's first text.
        late_s: How long after it was due it was started.
        text: Its answer.
        retrieval: What its search took and what was guessed meanwhile.
    """

    ttft_s: float
    late_s: float
    text: str
    retrieval: RetrievalReport


@sgl.function  # type: ignore[untyped-decorator, unused-ignore]
def _answer(
    s: Any, retriever: Retriever, question: str, k: int, tokens: int, speculative: bool
) -> None:
    s += INSTRUCTION
    s += rag_retrieve(retriever, question, k=k, speculative=speculative)
    s += f"Question {question}\nAnswer:"
    s += sgl.gen("answer", max_tokens=tokens, temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class ProgramLoad:
    """Programs that ask numbered questions.

    Attributes:
        endpoint: Where they run.
        retriever: Finds their documents.
        k: Documents of each.
        output_tokens: Tokens that each generates.
        speculative: Whether they guess while they search.
    """

    endpoint: RagEndpoint
    retriever: Retriever
    k: int
    output_tokens: int
    speculative: bool

    def run(
        self, questions: Sequence[int], due_s: Sequence[float] | None, first: int = 0
    ) -> list[ProgramOutcome]:
        """Ask each question when it is due; without `due_s`, one after the other.

        Args:
            questions: Numbers of the questions.
            due_s: When each is due, from the start of the run.
            first: Number of the first request; no two requests of a server's life are to share
                theirs, which makes their prompts differ.
        """
        started_s = time.perf_counter()

        def ask(position: int) -> ProgramOutcome:
            now_s = time.perf_counter()
            due = now_s if due_s is None else started_s + due_s[position]
            time.sleep(max(0.0, due - now_s))
            return self._ask(questions[position], first + position, due)

        workers = 1 if due_s is None else len(questions)
        with ThreadPoolExecutor(workers) as threads:
            return list(threads.map(ask, range(len(questions))))

    def _ask(self, number: int, request: int, due_s: float) -> ProgramOutcome:
        late_s = time.perf_counter() - due_s
        state = _answer.run(
            retriever=self.retriever,
            question=f"{number}: {words(f'question {request}', QUESTION_WORDS)}",
            k=self.k,
            tokens=self.output_tokens,
            speculative=self.speculative,
            backend=self.endpoint,
            stream=True,
        )
        ttft_s = None
        for piece in state.text_iter("answer"):
            if piece and ttft_s is None:
                ttft_s = time.perf_counter() - due_s
        if error := state.error():
            raise error
        # A token may be half a character, so that an answer may have no text at all.
        if ttft_s is None:
            ttft_s = time.perf_counter() - due_s
        return ProgramOutcome(ttft_s, late_s, state["answer"], state.get_meta_info("docs"))
