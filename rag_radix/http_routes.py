"""`GET /rag/stats`: the knowledge tree's statistics over HTTP.

The route needs the same key as SGLang's `/server_info` (`--api-key`, when set).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException, Response

from rag_radix.admission import counters
from rag_radix.names import STATE_KEY

STATS_PATH = "/rag/stats"


def add_routes(app: FastAPI, tokenizer_manager: Callable[[], Any]) -> None:
    """Add the routes to SGLang's app.

    Args:
        app: The app.
        tokenizer_manager: Finds the tokenizer manager once there are requests.
    """

    async def rag_stats() -> Response:
        """Statistics of every data-parallel rank, and what came through this process's door."""
        states = await tokenizer_manager().get_internal_state()
        return Response(orjson.dumps(assemble(states)), media_type="application/json")

    app.add_api_route(STATS_PATH, rag_stats, methods=["GET"])


def assemble(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the answer from the schedulers' internal states.

    With one data-parallel rank its statistics are the top level, otherwise they stand under
    ``ranks``; ``door`` holds the counts of the HTTP process that answers.

    Raises:
        HTTPException: A scheduler has no knowledge tree.
    """
    ranks = [state.get(STATE_KEY) for state in states]
    if any(rank is None for rank in ranks):
        raise HTTPException(503, "the scheduler reports no knowledge tree")
    door = counters.snapshot()
    if len(ranks) == 1:
        return {**(ranks[0] or {}), "door": door}
    return {"ranks": ranks, "door": door}
