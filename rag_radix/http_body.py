"""Bodies of requests, read up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rag_radix.errors import TooLargeError

if TYPE_CHECKING:
    from fastapi import Request


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The body of `request`; no more than the limit of it is ever in memory.

    Raises:
        TooLargeError: It is longer.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise TooLargeError(f"the body has more than {most_bytes:,} bytes, the most allowed")
    return bytes(body)
