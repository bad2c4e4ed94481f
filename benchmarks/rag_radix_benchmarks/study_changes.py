"""Whether a result that was kept is of the options that its study's file has now."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from rag_radix_benchmarks.study_file import Part, by_option
from rag_radix_benchmarks.study_results import Measured

# Before a command's options: rag-radix bench NAME.
COMMAND_WORDS = 3
MODEL_PATH = "--model-path"


def other_options(part: Part, measured: Measured) -> list[str]:
    """Options that a result was measured with and that its part has otherwise now.

    Args:
        part: As its file has it.
        measured: A result of one of its steps.

    Returns:
        A few words of Markdown for each; none where nothing has changed.
    """
    report = measured.report
    then, servers_then = _halves(shlex.split(report["command"])[COMMAND_WORDS:])
    now, servers_now = _halves([*measured.step.arguments(measured.quick), "--", *part.server_flags])
    # The command names no folder of the machine that it ran on.
    then.pop(MODEL_PATH, None)
    if MODEL_PATH in now:
        then[MODEL_PATH] = f"{MODEL_PATH} {report['config']['model_path']}"
    return [*_differences(then, now), *_differences(servers_then, servers_now)]


def _halves(arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """A benchmark's options and those of its servers, by option."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    own, servers = (
        {option: _text(values) for option, values in by_option(half).items()}
        for half in (arguments[:end], arguments[end + 1 :])
    )
    return own, servers


def _text(words: Sequence[str]) -> str:
    """As on a command line, wherever peers are served."""
    return re.sub(r"@https?://[^,+'\s]+", "@PEER", shlex.join(words))


def _differences(then: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    for option in dict.fromkeys((*then, *now)):
        old, new = then.get(option), now.get(option)
        if old is None:
            yield f"without `{new}`"
        elif old != new:
            yield f"`{old}`, now " + ("left out" if new is None else f"`{new}`")
