"""A server's own routes beside the OpenAI-compatible ones, over an OpenAI client's connection."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from rag_radix_frontend.errors import RequestError
from rag_radix_frontend.gate import Gate
from rag_radix_frontend.retrieval_report import RetrievalLog

_RETRY_S = 0.1


class ChatServer:
    """What programs on one client and event loop share.

    Args:
        client: An `openai.AsyncOpenAI`; its address may end with `/v1`.

    Attributes:
        gate: Lets speculations through.
        log: What all retrievals took.
    """

    def __init__(self, client: Any) -> None:
        # A refused speculation isn't tried again by the client's own rule.
        self._client = client.with_options(max_retries=0)
        self._root = str(client.base_url).rstrip("/").removesuffix("/v1")
        self._loop = asyncio.get_running_loop()
        self._background: set[asyncio.Task[None]] = set()
        self.log = RetrievalLog()
        self.gate = Gate(self._room)

    async def create(self, options: dict[str, Any]) -> Any:
        """`chat.completions.create`, tried once."""
        return await self._client.chat.completions.create(**options)

    async def promote(self, rid: str) -> bool:
        """Make a speculation an ordinary request; whether the server knows it."""
        reply = await self._client.post(
            f"{self._root}/rag/promote", body={"rids": [rid]}, cast_to=object
        )
        return bool(reply["rids"][rid] in ("running", "finished"))

    def end(self, rid: str, request: asyncio.Task[None]) -> None:
        """End a request in the background."""
        task = self._loop.create_task(self._end(rid, request))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _end(self, rid: str, request: asyncio.Task[None]) -> None:
        # The server ignores an id that it hasn't seen yet, so ask again.
        while not request.done():
            with contextlib.suppress(Exception):
                await self._client.post(
                    f"{self._root}/abort_request", body={"rid": rid}, cast_to=object
                )
            await asyncio.wait([request], timeout=_RETRY_S)

    def _room(self) -> int:
        """How many more speculations the server would take; asked on the gate's thread."""
        asked = asyncio.run_coroutine_threadsafe(
            self._client.get(f"{self._root}/rag/pool", cast_to=object), self._loop
        )
        try:
            pool: Any = asked.result()
        except Exception as error:
            raise RequestError(str(error), getattr(error, "status_code", None)) from error
        return max(1, pool["max_prefill_bs"] - pool["waiting"]) if pool["accepts"] else 0
