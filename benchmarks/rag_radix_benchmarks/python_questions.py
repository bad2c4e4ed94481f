"""Questions about Python's language reference, each with what a right answer contains.

The reference is the text of `pydoc_data.topics`, which every CPython carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import orjson


class Question(NamedTuple):
    """A question, and a string that a right answer contains, whatever its case."""

    text: str
    expected: str


QUESTIONS = tuple(
    Question(*pair)
    for pair in (
        ("Which statement is a convenient way to insert debugging assertions?", "assert"),
        ("Which exception does a failing assert statement raise?", "AssertionError"),
        ("Which statement terminates the nearest enclosing loop?", "break"),
        ("Which statement goes on with the next cycle of the nearest loop?", "continue"),
        ("Which keyword creates an anonymous function?", "lambda"),
        ("Which statement wraps a block with methods of a context manager?", "with"),
        ("Which method of a context manager is called on entering it?", "__enter__"),
        ("Which method of a context manager is called on leaving it?", "__exit__"),
        ("Which statement removes the binding of a name?", "del"),
        ("Which statement does nothing when it is executed?", "pass"),
        ("Which statement leaves the current function call with a value?", "return"),
        ("Which keyword makes a function a generator function?", "yield"),
        ("Which statement re-raises the exception that is being handled?", "raise"),
        ("Which statement makes names refer to global variables?", "global"),
        ("Which statement makes names refer to variables of an enclosing scope?", "nonlocal"),
        ("Which exception is raised when a name is not found at all?", "NameError"),
        ("What is the only value of the type of None?", "None"),
        ("Which method is called to create a new instance of a class?", "__new__"),
        ("Which method is called after the instance has been created?", "__init__"),
        ("Which method computes the official string representation of an object?", "__repr__"),
        ("Which built-in function calls __hash__?", "hash"),
        ("Which method makes an instance callable?", "__call__"),
        ("Which operator computes the power of its operands?", "**"),
        ("Which operator tests for an object's identity?", "is"),
        ("Which clause is executed in any case on the way out of a try statement?", "finally"),
        ("Which statement imports names from a module directly?", "from"),
        ("Which values are considered false besides None, zero and empty containers?", "False"),
        ("What are the two values of the Boolean type?", "True"),
        ("Which prefix marks a raw string literal?", "r"),
        ("Which sequence types are immutable besides strings and bytes?", "tuple"),
    )
)


def write_reference(path: Path, characters: int = 1200) -> None:
    """Write the reference as a source of documents, cut between paragraphs.

    Args:
        path: JSON lines with `id` and `text`.
        characters: A document ends with the paragraph that reaches this length.
    """
    from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

    with path.open("wb") as file:
        for topic in sorted(topics):
            for number, text in enumerate(_parts(topics[topic], characters)):
                line = {"id": f"{topic}/{number}", "text": text}
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _parts(text: str, characters: int) -> Iterator[str]:
    part = ""
    for paragraph in text.split("\n\n"):
        part += paragraph + "\n\n"
        if len(part) >= characters:
            yield part.strip()
            part = ""
    if part.strip():
        yield part.strip()
