"""Reading and writing traces."""

from __future__ import annotations

import logging
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rag_radix.errors import TraceError
from rag_radix.replay.trace import (
    TraceDocument,
    TraceRequest,
    TraceWriter,
    read_trace,
    write_trace,
)

REQUESTS = [
    TraceRequest(
        0.5,
        (TraceDocument("wiki/1", "3", 10, 40), TraceDocument("é", "", 44, 50)),
        90,
        output_tokens=7,
        namespace="tenant",
        shared_tokens=40,
        shared_namespace="adapter",
    ),
    TraceRequest(1.25, (), 12),
]


def test_a_written_trace_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, REQUESTS)
    assert read_trace(path) == REQUESTS


def test_a_prompt_is_in_the_shared_namespace_up_to_its_salt() -> None:
    assert [REQUESTS[0].namespace_at(at) for at in (0, 39, 40, 89)] == [
        *["adapter"] * 2,
        *["tenant"] * 2,
    ]
    assert REQUESTS[1].namespace_at(0) == ""


def test_blank_lines_and_fields_with_defaults_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 1, "prompt_tokens": 9, "documents": [{"id": "a", "start": 0, "end": 4}]}\n\n'
    )
    assert read_trace(path) == [TraceRequest(1.0, (TraceDocument("a", "", 0, 4),), 9)]


def test_a_field_that_may_be_missing_may_be_null(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 1, "prompt_tokens": 9, "output_tokens": null, "namespace": null, '
        '"shared_tokens": null, "shared_namespace": null, '
        '"documents": [{"id": "a", "version": null, "start": 0, "end": 4}]}\n'
    )
    assert read_trace(path) == [TraceRequest(1.0, (TraceDocument("a", "", 0, 4),), 9)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a JSON object"),
        ("[1]", r"\[1\] is not a JSON object"),
        ('{"arrival_s": 0, "documents": []}', "prompt_tokens is missing"),
        ('{"arrival_s": 0, "documents": null, "prompt_tokens": 1}', "documents is missing"),
        ('{"arrival_s": 0, "documents": [], "prompt_tokens": true}', "prompt_tokens=True"),
        ('{"arrival_s": 0, "documents": [], "prompt_tokens": -1}', "must not be negative"),
        ('{"arrival_s": "0", "documents": [], "prompt_tokens": 1}', "arrival_s='0'"),
        ('{"arrival_s": 0, "documents": [3], "prompt_tokens": 1}', r"documents\[0\]=3"),
        (
            '{"arrival_s": 0, "documents": [{"id": 3, "start": 0, "end": 1}], "prompt_tokens": 1}',
            r"documents\[0\].id=3",
        ),
        (
            '{"arrival_s": 0, "documents": [{"id": "a", "start": 0, "end": 2}], '
            '"prompt_tokens": 1}',
            r"documents\[0\] spans \[0, 2\)",
        ),
        (
            '{"arrival_s": 0, "documents": [{"id": "a", "start": 2, "end": 4}, '
            '{"id": "b", "start": 3, "end": 5}], "prompt_tokens": 9}',
            r"documents\[1\] spans \[3, 5\)",
        ),
        (
            '{"arrival_s": 0, "documents": [{"id": "a", "start": 2, "end": 4}], '
            '"prompt_tokens": 9, "shared_tokens": 3}',
            "shared_tokens=3: a salt begins at the first document or where one ends: 0, 2, 4",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "documents": [], "prompt_tokens": 1}\n' + line + "\n")
    with pytest.raises(TraceError, match=rf"trace.jsonl:2.*{message}"):
        read_trace(path)


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        read_trace(tmp_path / "nowhere")


def test_the_writer_appends_whole_lines_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, REQUESTS[:1])
    writer = TraceWriter(path)
    writer.append(REQUESTS[1])
    assert read_trace(path) == REQUESTS
    writer.close()


def test_a_writer_for_an_impossible_place_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="writable folder"):
        TraceWriter(tmp_path / "no" / "trace.jsonl")


def test_a_failing_write_ends_the_trace_with_one_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = TraceWriter("/dev/full")
    with caplog.at_level(logging.ERROR):
        for request in REQUESTS * 2:
            writer.append(request)
    assert len(caplog.records) == 1
    assert "/dev/full" in caplog.text


@contextmanager
def room_for(more: int, path: Path) -> Iterator[None]:
    """A file that may grow by `more` bytes, as on a disk that gets full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_of_a_line_that_finds_no_room_nothing_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    writer.append(REQUESTS[0])
    with room_for(10, path):
        writer.append(REQUESTS[1])
    writer.append(REQUESTS[1])  # the trace has ended
    assert "ends here, a write failed: there was room for a part" in caplog.text
    assert read_trace(path) == REQUESTS[:1]
    TraceWriter(path).append(REQUESTS[1])
    assert read_trace(path) == REQUESTS


def test_what_another_rank_has_written_behind_half_a_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    one, other = TraceWriter(path), TraceWriter(path)
    one.append(REQUESTS[0])
    other.append(REQUESTS[1])
    one._take_back(10)
    assert read_trace(path) == REQUESTS


def test_a_last_line_that_is_cut_off_is_left_out_and_gives_way_to_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, REQUESTS)
    path.write_bytes(path.read_bytes()[:-9])
    assert read_trace(path) == REQUESTS[:1]
    assert "trace.jsonl:2 is left out: the file ends within this line" in caplog.text
    TraceWriter(path).append(REQUESTS[1])
    assert "ended within a line" in caplog.text
    assert read_trace(path) == REQUESTS


def test_a_last_line_without_its_end_is_a_request_and_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, REQUESTS[:1])
    path.write_bytes(path.read_bytes()[:-1])
    assert read_trace(path) == REQUESTS[:1]
    TraceWriter(path).append(REQUESTS[1])
    assert read_trace(path) == REQUESTS


def test_a_document_id_that_json_cannot_hold_does_not_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    writer.append(TraceRequest(0.0, (TraceDocument("\ud800", "", 0, 1),), 2))
    assert "a write failed" in caplog.text
