"""A real load: questions over a corpus of one's own, through its retriever, as tokens."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rag_radix_frontend import Document, FaissRetriever, Retriever
from rag_radix_frontend.errors import FrontendError
from rag_radix_frontend.retriever import final_documents
from rag_radix_frontend.template import DEFAULT_TEMPLATE, compile_template

from rag_radix.errors import ConfigError
from rag_radix.replay.trace import TraceDocument, TraceRequest
from rag_radix_benchmarks.waited_retriever import WaitedRetriever
from rag_radix_benchmarks.workload import Part

# Of a search that is waited for, where the index can be searched in stages.
WAITED_STAGES = 8
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
        prompts = [self._prompt(*asked) for asked in self._asked(repeat)]
        requests, ids = zip(*prompts, strict=True)
        return Part(requests[: self.warm_up], requests[self.warm_up :], ids)

    def _asked(self, repeat: int) -> Iterator[tuple[int, str, float]]:
        """Number, question and arrival of each request."""
        texts = _questions(self.index, self.questions)
        rng = np.random.default_rng([self.seed, repeat])
        chances = np.arange(1, len(texts) + 1) ** -self.skew
        count = self.warm_up + self.requests
        asked = rng.permutation(len(texts))[
            rng.choice(len(texts), size=count, p=chances / chances.sum())
        ]
        arrivals = np.cumsum(rng.exponential(size=count)).tolist()
        for number, (question, arrival_s) in enumerate(zip(asked, arrivals, strict=True)):
            yield number, texts[question], arrival_s

    def _prompt(
        self, number: int, question: str, arrival_s: float
    ) -> tuple[TraceRequest, tuple[int, ...]]:
        ids = list(_tokens(self.model_path, INSTRUCTION, is_first=True))
        places = []
        for document in _found(self.index, question, self.k):
            start = len(ids)
            ids += _tokens(self.model_path, compile_template(DEFAULT_TEMPLATE)(document))
            places.append(TraceDocument(document.id, document.version, start, len(ids)))
        ids += _tokens(self.model_path, question_text(number, question))
        request = TraceRequest(arrival_s, tuple(places), len(ids), self.output_tokens)
        return request, tuple(ids)


@dataclass(frozen=True)
class CorpusPrograms(CorpusQuestions):
    """The same questions, asked by `rag_retrieve()` programs.

    Prompts have the same tokens in all arms. Documents found and the bound are of the retriever's
    order.

    Attributes:
        search_s: Length of a search that was done before and is waited for; 0 to search.
    """

    search_s: float

    def part(self, repeat: int) -> Part:
        questions = tuple((number, text) for number, text, _ in self._asked(repeat))
        return replace(super().part(repeat), questions=questions)

    def retriever(self, queries: Sequence[str]) -> Retriever:
        """Finds the documents of these questions."""
        if not self.search_s:
            return _retriever(self.index)
        waited = _waited(self.index, self.search_s)
        waited.prepare(queries, self.k)
        return waited

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return _tokenizer(self.model_path)

    def tokens(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer."""
        return _tokens(self.model_path, text)


def question_text(number: int, question: str) -> str:
    """What follows the documents in a prompt."""
    return f"Question {number}: {question}\nAnswer:"


@functools.cache
def _waited(index: str, search_s: float) -> WaitedRetriever:
    return WaitedRetriever(_retriever(index, WAITED_STAGES), search_s)


@functools.cache
def _retriever(index: str, stages: int | None = None) -> FaissRetriever:
    try:
        return FaissRetriever.open(index, stages=stages)
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
