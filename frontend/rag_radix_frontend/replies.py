"""What the server's replies say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from rag_radix_frontend.connections import finish
from rag_radix_frontend.errors import (
    RequestAborted,
    RequestError,
    SpeculationEnded,
    SpeculationRefused,
)
from rag_radix_frontend.wire import ENDED, REFUSED

_SPECULATION = ((REFUSED, SpeculationRefused), (ENDED, SpeculationEnded))


def checked(reply: Any) -> Any:
    """The reply, where its status says that the server did as it was asked.

    Raises:
        RequestError: it didn't.
    """
    if reply.status_code == HTTPStatus.OK:
        return reply
    try:
        content = reply.json()
    except ValueError:
        content = reply.text
    said = message(content)
    for prefix, kind in _SPECULATION:
        if said.startswith(prefix):
            raise kind(said)
    raise _error(content, reply.status_code)


def _error(content: Any, status: int | None) -> RequestError:
    has_failed = status is not None and status >= HTTPStatus.INTERNAL_SERVER_ERROR
    did = "failed at" if has_failed else "refused"
    return RequestError(f"the server {did} the request: {content}", status)


def message(content: Any) -> str:
    """What an error reply says: SGLang has several forms of it."""
    for key in ("message", "error", "detail"):
        if isinstance(content, Mapping) and key in content:
            return message(content[key])
    return str(content)


def events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent stream.

    Raises:
        ConnectionResetError: the stream stops before its mark of an end.
    """
    for line in response.iter_lines():
        if line == b"data: [DONE]":
            finish(response)
            return
        if line.startswith(b"data:"):
            try:
                event = json.loads(line.removeprefix(b"data:"))
            except ValueError:  # its end is missing
                break
            yield event
    raise ConnectionResetError("the server closed the stream before its end; its log may say why")


def check_result(result: dict[str, Any]) -> None:
    """Raise what a result or an event says of the failure of its request, if it does.

    Raises:
        RequestError: the server refused the request, failed at it or ended it.
    """
    if "error" in result:
        error = result["error"]
        code = error.get("code") if isinstance(error, Mapping) else None
        raise _error(error, code if isinstance(code, int) else None)
    reason = result["meta_info"].get("finish_reason")
    if reason and reason["type"] == "abort":
        said = reason.get("message") or ""
        for prefix, kind in _SPECULATION:
            if said.startswith(prefix):
                raise kind(said, result["meta_info"])
        raise RequestAborted(
            f"the request was aborted: {said}", result["meta_info"], reason.get("status_code")
        )
