"""Request traces: which documents a request had where, and when it came. Never any text."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rag_radix.errors import TraceError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceDocument:
    """One document in a prompt.

    Attributes:
        id: Names the document.
        version: Its revision; another version is another text.
        start: First token in the prompt.
        end: One past its last token.
    """

    id: str
    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its documents' places in the prompt, ascending and disjoint.

    Tokens outside the documents are known by length alone. What precedes a document is
    template text, the same whenever its place and length agree; what follows the last
    document is the question, never the same twice.

    Attributes:
        arrival_s: Seconds since the trace began.
        documents: The documents in prompt order.
        prompt_tokens: Tokens of the whole prompt.
        output_tokens: Tokens generated.
        namespace: Requests share cached prefixes only within a namespace.
        shared_tokens: So much of the prompt, up to the first document or to the end of one, lies
            in another namespace, which a salt doesn't cover.
        shared_namespace: That one; for all requests without a salt their own.
    """

    arrival_s: float
    documents: tuple[TraceDocument, ...]
    prompt_tokens: int
    output_tokens: int = 0
    namespace: str = ""
    shared_tokens: int = 0
    shared_namespace: str = ""

    def namespace_at(self, position: int) -> str:
        """The namespace of the token at `position`."""
        return self.shared_namespace if position < self.shared_tokens else self.namespace


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Read a trace of JSON lines, one request a line; blank lines are skipped.

    The last line is left out, with a warning, where the file ends within it: its writer has died.

    Raises:
        TraceError: The file can't be read, or a line isn't a request.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise TraceError(f"trace {str(path)!r} can't be read: {error}") from error
    if _is_cut_off(lines[-1]):
        logger.warning("%s:%d is left out: the file ends within this line", path, len(lines))
        lines.pop()
    return [
        _request(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> None:
    """Write `requests` as a trace; an existing file is replaced."""
    with Path(path).open("wb") as file:
        file.writelines(_line(request) for request in requests)


class TraceWriter:
    """Appends a running server's requests to a trace.

    A trace is never worth a failing request: the first write that fails is logged and ends
    the trace. Of a line that found no room nothing is left, neither here nor from an earlier
    writer, so that the file stays one of whole lines.

    Raises:
        TraceError: The file can't be opened for appending.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            # Unbuffered: one `write` a line, so that a reader never meets half a request.
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115
            self._begin_line()
        except OSError as error:
            raise TraceError(
                f"trace {str(path)!r} can't be written ({error}): give a file in a writable folder"
            ) from error

    def append(self, request: TraceRequest) -> None:
        """Write one line, unless the trace has ended."""
        if self._file.closed:
            return
        try:
            line = _line(request)
            written = self._file.write(line)
            if written < len(line):
                self._take_back(written)
                raise OSError("there was room for a part of a line only")
        except (OSError, orjson.JSONEncodeError) as error:
            logger.error("the trace %s ends here, a write failed: %s", self._file.name, error)
            self.close()

    def close(self) -> None:
        """End the trace; what is appended later is dropped."""
        try:
            self._file.close()
        except OSError as error:
            logger.error("closing the trace %s failed: %s", self._file.name, error)

    def _begin_line(self) -> None:
        """Let what is appended begin a line, whatever the file ends with."""
        last = _last_line(Path(self._file.name))
        if _is_cut_off(last):
            logger.warning("the trace %s ended within a line, which is taken out", self._file.name)
            self._take_back(len(last))
        elif last:
            self._file.write(b"\n")

    def _take_back(self, count: int) -> None:
        """Remove the last `count` bytes, unless another rank has gone on behind them."""
        end = self._file.tell()
        if os.fstat(self._file.fileno()).st_size == end:
            self._file.truncate(end - count)


def _last_line(path: Path) -> bytes:
    """What follows the last end of a line."""
    if path.stat().st_size == 0:  # a device or pipe has none either
        return b""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content[content.rfind(b"\n") + 1 :]


def _is_cut_off(line: bytes) -> bool:
    """Whether a line without an end is the beginning of a request."""
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return line.startswith(b"{")
    return False


def _line(request: TraceRequest) -> bytes:
    return orjson.dumps(request, option=orjson.OPT_APPEND_NEWLINE)


def _request(line: bytes, where: str) -> TraceRequest:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{where}: not a JSON object ({error})") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: {fields!r} is not a JSON object")
    documents = _field(fields, "documents", list, where)
    prompt_tokens = _count(fields, "prompt_tokens", where)
    arrival_s = _field(fields, "arrival_s", (int, float), where)
    spans = tuple(_document(each, f"{where}: documents[{i}]") for i, each in enumerate(documents))
    end = 0
    for i, span in enumerate(spans):
        if not end <= span.start < span.end <= prompt_tokens:
            raise TraceError(
                f"{where}: documents[{i}] spans [{span.start}, {span.end}): spans must be "
                f"non-empty, ascending and disjoint, and end within prompt_tokens={prompt_tokens}"
            )
        end = span.end
    shared_tokens = _count(fields, "shared_tokens", where, default=0)
    ends = [0, *(span.start for span in spans[:1]), *(span.end for span in spans)]
    if shared_tokens not in ends:
        raise TraceError(
            f"{where}.shared_tokens={shared_tokens}: a salt begins at the first document or where "
            f"one ends: {', '.join(map(str, ends))}"
        )
    return TraceRequest(
        arrival_s=float(arrival_s),
        documents=spans,
        prompt_tokens=prompt_tokens,
        output_tokens=_count(fields, "output_tokens", where, default=0),
        namespace=_field(fields, "namespace", str, where, default=""),
        shared_tokens=shared_tokens,
        shared_namespace=_field(fields, "shared_namespace", str, where, default=""),
    )


def _document(fields: Any, where: str) -> TraceDocument:
    if not isinstance(fields, dict):
        raise TraceError(f"{where}={fields!r} is not a JSON object")
    return TraceDocument(
        id=_field(fields, "id", str, where),
        version=_field(fields, "version", str, where, default=""),
        start=_count(fields, "start", where),
        end=_count(fields, "end", where),
    )


def _count(fields: dict[str, Any], name: str, where: str, default: int | None = None) -> int:
    value: int = _field(fields, name, int, where, default)
    if value < 0:
        raise TraceError(f"{where}.{name}={value}: must not be negative")
    return value


def _field(
    fields: dict[str, Any],
    name: str,
    kind: type | tuple[type, ...],
    where: str,
    default: object = None,
) -> Any:
    # Some writers of JSON leave nothing out.
    value = default if fields.get(name) is None else fields[name]
    if value is None:
        raise TraceError(f"{where}.{name} is missing")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TraceError(f"{where}.{name}={value!r} has the wrong type")
    return value
