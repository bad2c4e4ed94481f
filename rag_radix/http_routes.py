"""The routes under `/rag` that SGLang's HTTP server gets.

All of them need the same key as SGLang's `/server_info` (`--api-key`, when set). An error is
answered with ``{"error": {"message": ...}}``: 400 when the request is malformed, 413 when it is too
large, 500 when a scheduler failed.

- `GET /rag/stats`: the knowledge tree's statistics.
- `POST /rag/promote` ``{"rids": [...]}``: these speculations were right. Answers
  ``{"rids": {rid: state}}``. "running": it waits or runs, and from now on is an ordinary request:
  it is never ended, and it counts. "finished": it has ended with its answer, and counts.
  "unknown": it was refused, ended or cancelled, is no speculation, is forgotten (the last 1,024
  that have ended are known), or hasn't reached the schedulers within a second: ask again. To
  promote twice changes nothing. A batch's requests have an id each: those given, or
  ``<rid>_<index>`` when only one was.
- `GET /rag/pool`: ``{"waiting": n, "max_prefill_bs": m, "accepts": bool}``: how many requests wait,
  and whether a speculation would be admitted now. Of several data-parallel ranks, the one with
  the fewest.
- `POST /rag/order` ``{"text": ..., "documents": [...]}``: in which order of these texts, behind
  that one, the longest prefix is cached; with ``cache_salt``, ``extra_key`` and ``rag`` of the
  request, if it has them. Answers ``{"order": [...], "cached_tokens": n}``; see
  `rag_radix.document_order`. Of several data-parallel ranks, the one that has most.
- `POST /rag/place` ``{"text": ..., "rag": ..., "cache_salt": ...}``: the tokens of a prompt as
  `/generate` would have them, and where its documents are among these. Answers ``{"input_ids":
  [...], "rag": ...}``: a request with both, whatever else follows the tokens, finds what the one
  with the text has left; see `rag_radix.admission`.

The operators' routes are in `rag_radix.control.routes`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException, Request, Response

from rag_radix import document_order
from rag_radix.admission import counters, place
from rag_radix.control import warming
from rag_radix.control.routes import add_control_routes
from rag_radix.errors import RpcError, TooLargeError
from rag_radix.http_body import read_body
from rag_radix.names import ORDER_ACTION, POOL_ACTION, PROMOTE_ACTION, STATE_KEY

STATS_PATH = "/rag/stats"
PROMOTE_PATH = "/rag/promote"
POOL_PATH = "/rag/pool"
ORDER_PATH = "/rag/order"
PLACE_PATH = "/rag/place"

# How long a promotion waits for a request to be tokenized, much longer than that takes: requests
# stay there while SGLang is paused or gets other weights.
_DISPATCH_S = 1.0
MAX_RIDS = 1024
MAX_RID_CHARS = 512
MAX_PROMOTE_BYTES = 1 << 20
MAX_ORDER_BYTES = 16 << 20

Call = Callable[[str, Any], Awaitable[list[Any]]]


def add_routes(app: FastAPI, tokenizer_manager: Callable[[], Any], call: Call) -> None:
    """Add the routes to SGLang's app.

    Args:
        app: The app.
        tokenizer_manager: Finds the tokenizer manager once there are requests.
        call: Calls an action of the schedulers (`rpc.Caller.call`).
    """

    async def rag_stats() -> Response:
        """Statistics of every data-parallel rank, and what came through this process's door."""
        states = await tokenizer_manager().get_internal_state()
        return _json(assemble(states))

    async def rag_promote(request: Request) -> Response:
        try:
            rids = parse_rids(await read_body(request, MAX_PROMOTE_BYTES))
        except ValueError as error:
            return _refusal(error)
        await _are_dispatched(tokenizer_manager(), rids)
        try:
            ranks = await call(PROMOTE_ACTION, rids)
        except RpcError as error:
            return _error(500, error)
        return _json({"rids": {rid: _known(rid, ranks) for rid in rids}})

    async def rag_pool() -> Response:
        try:
            ranks = await call(POOL_ACTION, None)
        except RpcError as error:
            return _error(500, error)
        return _json(min(ranks, key=lambda rank: rank["waiting"]))

    async def rag_order(request: Request) -> Response:
        manager = tokenizer_manager()
        try:
            body = await read_body(request, MAX_ORDER_BYTES)
            question = document_order.parse(body, manager.tokenizer, manager.context_len)
        except ValueError as error:
            return _refusal(error)
        try:
            ranks = await call(ORDER_ACTION, question)
        except RpcError as error:
            return _error(500, error)
        return _json(max(ranks, key=lambda rank: rank["cached_tokens"]))

    async def rag_place(request: Request) -> Response:
        try:
            return _json(place(await read_body(request, MAX_ORDER_BYTES), tokenizer_manager()))
        except ValueError as error:
            return _refusal(error)

    app.add_api_route(STATS_PATH, rag_stats, methods=["GET"])
    app.add_api_route(PROMOTE_PATH, rag_promote, methods=["POST"])
    app.add_api_route(POOL_PATH, rag_pool, methods=["GET"])
    app.add_api_route(ORDER_PATH, rag_order, methods=["POST"])
    app.add_api_route(PLACE_PATH, rag_place, methods=["POST"])
    add_control_routes(app, call, warming.generator(tokenizer_manager))


def parse_rids(body: bytes) -> list[str]:
    """The ids in the body of a promotion.

    Raises:
        ValueError: It is malformed; the message names what.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body isn't JSON: {error}") from None
    if not isinstance(value, dict) or set(value) != {"rids"}:
        raise ValueError('the body must be an object with "rids" alone')
    rids = value["rids"]
    if not isinstance(rids, list) or not all(isinstance(rid, str) and rid for rid in rids):
        raise ValueError("rids must be an array of strings, none of them empty")
    if len(rids) > MAX_RIDS:
        raise ValueError(f"rids has {len(rids)} entries, at most {MAX_RIDS} are allowed")
    if (longest := max(map(len, rids), default=0)) > MAX_RID_CHARS:
        raise ValueError(
            f"an id of rids has {longest} characters, at most {MAX_RID_CHARS} are allowed"
        )
    return rids


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


async def _are_dispatched(manager: Any, rids: list[str]) -> None:
    """Wait for requests that are still being tokenized here: the schedulers don't know them.

    Not until the client has gone: it may end at once, and its answer counts by the promotion.
    """

    def is_on_its_way(rid: str) -> bool:
        # Asked for each time: one that can't be tokenized, or whose client has gone, is dropped.
        state = manager.rid_to_state.get(rid)
        return state is not None and not (state.dispatched or state.finished)

    deadline = time.monotonic() + _DISPATCH_S
    while any(map(is_on_its_way, rids)) and time.monotonic() < deadline:
        await asyncio.sleep(0.001)


def _known(rid: str, ranks: list[dict[str, str]]) -> str:
    return next((rank[rid] for rank in ranks if rank[rid] != "unknown"), "unknown")


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _refusal(error: ValueError) -> Response:
    return _error(413 if isinstance(error, TooLargeError) else 400, error)


def _error(status: int, error: Exception) -> Response:
    return _json({"error": {"message": str(error)}}, status)
