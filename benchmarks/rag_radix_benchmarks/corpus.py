"""A real load: questions over a corpus of one's own, through its retriever, as tokens."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rag_radix_frontend import Document, FaissRetriever
from rag_radix_frontend.errors import FrontendError
from rag_radix_frontend.retriever import final_documents
from rag_radix_frontend.template import DEFAULT_TEMPLATE, compile_template

from rag_radix.errors import ConfigError
from rag_radix.replay.trace import TraceDocument, TraceRequest
from rag_radix_benchmarks.workload import Part

INSTRUCTION = "Answer the question from the documents.\n\n"


@dataclass(frozen=True)
class CorpusQuestions:
    """Questions that some ask more often than others.

    The question on place n of a random order of popularity is asked with a chance that falls
    like `n ** -skew`; each repeat has its own order and arrivals, which are Poisson. Documents
    are found by the index's own retriever, before anything is measured, and tokenized in pieces,
    so that a document is the same tokens wherever it stands. Every question begins with its
    number: nobody asks the same in the same words, and the bound takes that for granted.

    Attributes:
        index: Folder that `rag-radix index build` wrote.
        questions: File with a question a line; None asks for the first line of each document.
        digest: Of both.
        model_path: Whose tokenizer makes the tokens.
        k: Documents a question.
        skew: Exponent of the popularity.
        output_tokens: Generated for each.
        warm_up: Requests of a repeat that aren't measured.
        requests: Requests of a repeat that are.
        seed: Of popularity, questions and arrivals.
    """

    index: str
    questions: str | None
    digest: str
    model_path: str
    k: int
    skew: float
    output_tokens: int
    warm_up: int
    requests: int
    seed: int

    @classmethod
    def open(cls, index: Path, questions: Path | None, **settings: Any) -> CorpusQuestions:
        """Check that there are questions and documents.

        Raises:
            ConfigError: There are none.
        """
        texts = _questions(str(index), None if questions is None else str(questions))
        if not texts:
            raise ConfigError(f"--questions {str(questions)!r} has no questions, one a line")
        digest = hashlib.blake2b(digest_size=8)
        digest.update((index / "manifest.json").read_bytes())
        digest.update("\n".join(texts).encode())
        path = None if questions is None else str(questions)
        return cls(index=str(index), questions=path, digest=digest.hexdigest(), **settings)

    def part(self, repeat: int) -> Part:
        texts = _questions(self.index, self.questions)
        rng = np.random.default_rng([self.seed, repeat])
        chances = np.arange(1, len(texts) + 1) ** -self.skew
        count = self.warm_up + self.requests
        asked = rng.permutation(len(texts))[
            rng.choice(len(texts), size=count, p=chances / chances.sum())
        ]
        arrivals = np.cumsum(rng.exponential(size=count)).tolist()
        prompts = [
            self._prompt(texts[question], number, arrival_s)
            for number, (question, arrival_s) in enumerate(zip(asked, arrivals, strict=True))
        ]
        requests, ids = zip(*prompts, strict=True)
        return Part(requests[: self.warm_up], requests[self.warm_up :], ids)

    def _prompt(
        self, question: str, number: int, arrival_s: float
    ) -> tuple[TraceRequest, tuple[int, ...]]:
        ids = list(_tokens(self.model_path, INSTRUCTION, is_first=True))
        places = []
        for document in _found(self.index, question, self.k):
            start = len(ids)
            ids += _tokens(self.model_path, compile_template(DEFAULT_TEMPLATE)(document))
            places.append(TraceDocument(document.id, document.version, start, len(ids)))
        ids += _tokens(self.model_path, f"Question {number}: {question}\nAnswer:")
        request = TraceRequest(arrival_s, tuple(places), len(ids), self.output_tokens)
        return request, tuple(ids)


@functools.cache
def _retriever(index: str) -> FaissRetriever:
    try:
        return FaissRetriever.open(index)
    except FrontendError as error:
        raise ConfigError(f"--corpus {index!r}: {error}") from error


@functools.cache
def _questions(index: str, path: str | None) -> tuple[str, ...]:
    if path is None:
        store = _retriever(index).store
        lines = [store[position].text.partition("\n")[0] for position in range(len(store))]
    else:
        try:
            lines = Path(path).read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"--questions {path!r} can't be read: {error}") from error
    # Several documents of one page may begin alike.
    return tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))


@functools.cache
def _found(index: str, question: str, k: int) -> tuple[Document, ...]:
    return tuple(document for document, _ in final_documents(_retriever(index), question, k))


@functools.cache
def _tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@functools.cache
def _tokens(model_path: str, text: str, is_first: bool = False) -> tuple[int, ...]:
    """Special tokens go before the first piece only."""
    return tuple(_tokenizer(model_path).encode(text, add_special_tokens=is_first))
