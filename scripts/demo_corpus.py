"""The demo's documents: Python's language reference, as the interpreter itself carries it.

`pydoc_data.topics` is in every CPython: some 80 topics, 110,000 tokens of real documentation.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHORTEST_TOKENS = 200
TARGET_TOKENS = 350
LONGEST_TOKENS = 600
OUTSIDE_COST = 1e6
UNDERLINE = re.compile(r"^[*=\-~^\"]{3,}\n?", re.MULTILINE)

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Document:
    """One passage; `id` is `topics/<topic>#<n>`, stable for one Python version."""

    id: str
    text: str


def write_corpus(path: Path, count_tokens: CountTokens) -> int:
    """Write the documents to `path`, one JSON object a line, and return how many."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

    documents = list(make_documents(topics, count_tokens))
    lines = (json.dumps({"id": doc.id, "text": doc.text}) + "\n" for doc in documents)
    path.write_text("".join(lines), encoding="utf-8")
    return len(documents)


def make_documents(topics: dict[str, str], count_tokens: CountTokens) -> Iterator[Document]:
    """Cut each topic into documents of 200 to 600 tokens at paragraph boundaries.

    A shorter topic stays one document. Long topics repeat the text of short ones ("compound"
    holds all of "if"); a paragraph belongs to the shortest topic that has it and to no other, so
    that two documents never say the same.
    """
    seen: set[str] = set()
    for name, text in sorted(topics.items(), key=lambda item: (len(item[1]), item[0])):
        paragraphs = [part.strip("\n") for part in UNDERLINE.sub("", text).split("\n\n")]
        fresh = [part for part in paragraphs if part.strip() and part not in seen]
        seen.update(fresh)
        if not fresh:
            continue
        title = paragraphs[0].strip().strip(".")
        chunks = chunk_paragraphs(fresh, count_tokens, count_tokens(title + "\n\n"))
        for number, chunk in enumerate(chunks):
            body = "\n\n".join(chunk)
            # Every passage names its topic, for the encoder as much as for the reader.
            text = body if body.startswith(title) else f"{title}\n\n{body}"
            yield Document(f"topics/{name}#{number}", text)


def chunk_paragraphs(
    paragraphs: list[str], count_tokens: CountTokens, title_tokens: int = 0
) -> list[list[str]]:
    """Group paragraphs, in order, into the runs whose token counts are nearest to the target.

    A run costs the square of its distance to the target, and far more outside of 200 to 600
    tokens; the cheapest grouping is found by dynamic programming over where the last run begins.
    """
    pieces = [piece for part in paragraphs for piece in split_long(part, count_tokens)]
    ends = [0, *itertools.accumulate(count_tokens(piece + "\n\n") for piece in pieces)]
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(ends)):
        best.append(
            min(
                (best[start][0] + run_cost(title_tokens + ends[end] - ends[start]), start)
                for start in range(end)
            )
        )
    runs = []
    end = len(pieces)
    while end:
        start = best[end][1]
        runs.append(pieces[start:end])
        end = start
    return runs[::-1]


def run_cost(tokens: int) -> float:
    outside = max(0, SHORTEST_TOKENS - tokens, tokens - LONGEST_TOKENS)
    return (tokens - TARGET_TOKENS) ** 2 + OUTSIDE_COST * outside


def split_long(paragraph: str, count_tokens: CountTokens) -> Iterator[str]:
    """Cut a paragraph that is too long for one document (a grammar, a table) between lines."""
    if count_tokens(paragraph) <= LONGEST_TOKENS // 2:
        yield paragraph
        return
    lines: list[str] = []
    for line in paragraph.split("\n"):
        if lines and count_tokens("\n".join([*lines, line])) > LONGEST_TOKENS // 2:
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)
