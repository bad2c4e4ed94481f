"""Calls from an HTTP process to every scheduler, and their replies.

A call names an action and carries a JSON value. SGLang passes it to every data-parallel rank and,
within one, to all tensor-parallel ranks between two passes, so that they act in the same order;
one of them replies. The types are ours, the transport is SGLang's own.

An action that raises answers its caller with an error and is logged; the scheduler goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import orjson
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import BaseReq
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from rag_radix.errors import RagRadixError, RpcError

logger = logging.getLogger(__name__)

Action = Callable[[Any, Any], Any]
"""Takes the scheduler and the body of a call, returns the body of the reply."""


class RagCall(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """A call to the schedulers; `body` is JSON, so that what can't be sent fails before it is."""

    number: int
    action: str
    body: bytes


class RagReply(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """What one data-parallel rank answers; `error` is None unless the action failed."""

    number: int
    body: bytes
    error: str | None = None


def register_types() -> None:
    """Let this process read calls and replies; SGLang reads only what it knows."""
    io_struct.hook_custom_types(RagCall, RagReply)


def serve(scheduler: Any, actions: Mapping[str, Action]) -> None:
    """Let `scheduler` answer calls of these actions."""

    def answer(call: RagCall) -> RagReply:
        body, error = b"null", None
        try:
            if call.action not in actions:
                known = ", ".join(sorted(actions))
                raise RpcError(f"the scheduler knows no action {call.action!r}, only {known}")
            body = orjson.dumps(actions[call.action](scheduler, orjson.loads(call.body)))
        except Exception as failure:
            logger.exception("The action %s failed", call.action)
            known_failure = isinstance(failure, RagRadixError)
            error = str(failure) if known_failure else f"{type(failure).__name__}: {failure}"
        return RagReply(number=call.number, body=body, error=error)

    scheduler._request_dispatcher += TypeBasedDispatcher([(RagCall, answer)])


@dataclass(slots=True)
class _Pending:
    done: asyncio.Future[list[RagReply]]
    replies: list[RagReply] = field(default_factory=list)


class Caller:
    """Calls the schedulers of SGLang's `TokenizerManager` `manager`.

    Calls run side by side: a caller that gives up takes no reply away from another.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._numbers = count()
        self._pending: dict[int, _Pending] = {}
        manager._result_dispatcher += TypeBasedDispatcher([(RagReply, self._receive)])

    async def call(self, action: str, body: Any = None) -> list[Any]:
        """The replies of the data-parallel ranks, in no particular order.

        Raises:
            RpcError: The action failed on one of them; its message says why.
        """
        self._manager.auto_create_handle_loop()
        number = next(self._numbers)
        pending = _Pending(asyncio.get_running_loop().create_future())
        self._pending[number] = pending
        try:
            self._manager._dispatch_to_scheduler(
                RagCall(number=number, action=action, body=orjson.dumps(body))
            )
            replies = await pending.done
        finally:
            del self._pending[number]
        errors = dict.fromkeys(reply.error for reply in replies if reply.error is not None)
        if errors:
            raise RpcError("; ".join(errors))
        return [orjson.loads(reply.body) for reply in replies]

    def _receive(self, reply: RagReply) -> None:
        pending = self._pending.get(reply.number)
        if pending is not None and not pending.done.done():
            pending.replies.append(reply)
            if len(pending.replies) == get_parallel().num_dp_ranks:
                pending.done.set_result(pending.replies)
