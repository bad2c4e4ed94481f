"""What the speculations of an OpenAI client share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from rag_radix_frontend.chat_connection import connection_of
from rag_radix_frontend.gate import Gate
from rag_radix_frontend.in_flight import InFlight
from rag_radix_frontend.promotion import Promoter
from rag_radix_frontend.retrieval_report import RetrievalLog


class ChatServer:
    """A server, as programs on one client and event loop see it.

    Args:
        client: An `openai.AsyncOpenAI`.

    Attributes:
        connection: Reaches the server.
        gate: Lets speculations through.
        in_flight: Ends their requests.
        log: What all retrievals took.
    """

    def __init__(self, client: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._promoter = Promoter(self._promote)
        self.connection = connection_of(client)
        self.gate = Gate(self._room)
        self.in_flight = InFlight(self._abort)
        self.log = RetrievalLog()

    def promote(self, rid: str, is_over: Callable[[], bool]) -> asyncio.Future[bool]:
        """Make a speculation an ordinary request, in the background; whether the server knows it.

        It may still be on its way, so it is asked again for a while unless it `is_over`.
        """
        promoted: asyncio.Future[bool] = self._loop.create_future()

        def settle(answer: bool) -> None:
            if not promoted.done():
                promoted.set_result(answer)

        def reply(answer: bool) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(settle, answer)

        self._promoter.ask([rid], is_over=is_over, reply=reply)
        return promoted

    # On threads

    def _promote(self, rids: list[str]) -> Mapping[str, str]:
        states: Mapping[str, str] = self.connection.call("/rag/promote", {"rids": rids})["rids"]
        return states

    def _abort(self, rid: str) -> None:
        self.connection.call("/abort_request", {"rid": rid})

    def _room(self) -> int:
        """How many more speculations the server would take."""
        pool = self.connection.call("/rag/pool")
        return max(1, pool["max_prefill_bs"] - pool["waiting"]) if pool["accepts"] else 0
