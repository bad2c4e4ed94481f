"""Questions to a synthetic corpus whose vectors a real index searches."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from time import perf_counter, sleep
from typing import NamedTuple, Protocol

from rag_radix_frontend import Document, ScoredDocument, Stage
from rag_radix_frontend.staged_search import Candidates, StagedSearch

from rag_radix_benchmarks.search_workload import Vectors


class Search(Protocol):
    """Stages for a question of the workload."""

    def stages(self, question: int, k: int) -> Iterator[Candidates]: ...


class LocalSearch:
    """The search of an index on this machine, whose cores the model needs, too."""

    def __init__(self, search: StagedSearch, queries: Vectors) -> None:
        self._search = search
        self._queries = queries

    def stages(self, question: int, k: int) -> Iterator[Candidates]:
        return self._search.search(self._queries[question], k)


class TimedStage(NamedTuple):
    """A stage, and how long after the search's start it came."""

    after_s: float
    candidates: Candidates


class WaitedSearch:
    """A search that was timed before and is now waited for, as for a remote vector database.

    Args:
        recorded: By question.
        scale: How many times as long as that it takes.
    """

    def __init__(self, recorded: Mapping[int, Sequence[TimedStage]], scale: float = 1.0) -> None:
        self._recorded = recorded
        self._scale = scale

    @classmethod
    def record(
        cls, search: Search, questions: Sequence[int], k: int, scale: float = 1.0
    ) -> WaitedSearch:
        """Time the search of each question; on an idle machine, or the times are others'."""
        recorded = {question: list(_timed(search.stages(question, k))) for question in questions}
        return cls(recorded, scale)

    @property
    def mean_s(self) -> float:
        """Mean time of a whole search."""
        ends_s = [stages[-1].after_s * self._scale for stages in self._recorded.values()]
        return sum(ends_s) / len(ends_s)

    def stages(self, question: int, k: int) -> Iterator[Candidates]:
        started_s = perf_counter()
        for stage in self._recorded[question]:
            sleep(max(0.0, started_s + stage.after_s * self._scale - perf_counter()))
            yield stage.candidates


def _timed(stages: Iterator[Candidates]) -> Iterator[TimedStage]:
    started_s = perf_counter()
    for candidates in stages:
        yield TimedStage(perf_counter() - started_s, candidates)


class NumberedRetriever:
    """Documents for questions that begin with their number, as `Questions.text` makes them.

    A document's text are words of Python's documentation, drawn by its number.
    """

    def __init__(self, search: Search, document_words: int) -> None:
        self._search = search
        self._document_words = document_words

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        for candidates in self._search.stages(int(query.split(":", 1)[0]), k):
            found = tuple(
                ScoredDocument(self._document(position), score)
                for position, score in zip(
                    candidates.positions.tolist(), candidates.scores.tolist(), strict=True
                )
            )
            yield Stage(found, candidates.final)

    def _document(self, position: int) -> Document:
        return Document(id=f"d{position}", text=words(f"document {position}", self._document_words))


def words(name: str, count: int) -> str:
    """Words drawn by a name, the same every time."""
    return " ".join(random.Random(name).choices(_vocabulary(), k=count))


@cache
def _vocabulary() -> list[str]:
    from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

    return sorted(set(re.findall("[a-z]{3,}", " ".join(topics.values()))))


def ask_by_popularity(questions: int, requests: int, seed: int) -> list[int]:
    """Numbers of the questions asked, the n-th most popular one in proportion to 1/n."""
    weights = list(accumulate(1 / rank for rank in range(1, questions + 1)))
    return random.Random(seed).choices(range(questions), cum_weights=weights, k=requests)
