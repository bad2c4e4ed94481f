"""Programs and scripts that the tests of speculation share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import Document, RetrievalReport, rag_retrieve
from unit.frontend.speculative_server import SpeculativeServer, eventually

# Of every module of tests in which programs speculate. Programs that fail are part of them.
SPECULATING = [
    pytest.mark.usefixtures("no_threads_left"),
    pytest.mark.filterwarnings("ignore:Error in stream_executor"),
]

CATS = Document("animals/cats", "Cats purr.", version="3")
DOGS = Document("animals/dogs", "Dogs bark.")
MOON = Document("space/moon", "The moon is round.")

GUESS, OTHER = (CATS, DOGS), (MOON,)


def sent(server: SpeculativeServer, count: int = 1) -> Callable[[], None]:
    """A step of a script: wait until so many speculations have arrived."""
    return lambda: eventually(
        lambda: len(server.speculations) >= count, f"{count} speculations never arrived"
    )


def ask(retriever: Any, **arguments: Any) -> Any:
    @sgl.function
    def program(s: Any) -> None:
        s += "Read. " + rag_retrieve(retriever, "q", **arguments)
        s += "Who? "
        s += sgl.gen("answer", temperature=0)

    return program


def report_of(state: Any, **expected: int) -> RetrievalReport:
    """The report of a retrieval once it says what is expected, which it must come to."""
    eventually(
        lambda: all(getattr(state.get_meta_info("docs"), k) == v for k, v in expected.items()),
        f"expected {expected}, got {state.get_meta_info('docs')}",
    )
    report = state.get_meta_info("docs")
    assert isinstance(report, RetrievalReport)
    return report


def settled(r: RetrievalReport) -> bool:
    """Whether it is known of every speculation what became of it."""
    return r.started == r.refused + r.ended + r.failed + r.cancelled + r.kept
