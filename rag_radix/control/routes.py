"""The operators' routes under `/rag`.

They obey SGLang's rules for administration: the admin key where `--admin-api-key` is set, else the
API key where that is set. With several data-parallel ranks the answers of all stand under
``ranks``. A malformed call gets a 400 that says what is wrong with it, as ``{"error": {"message":
...}}``, one that is too large a 413; nothing has happened then.

Where only one tenant's documents are meant, a body says so by ``cache_salt`` and ``extra_key``, as
that tenant's requests have them, or by ``namespace``, the name that the listings give to both. A
query has the name alone, since queries are logged.

- `GET /rag/documents`: see `documents.Page`. ``sort``, ``order``, ``offset``, ``limit``,
  ``prefix``, ``namespace``.
- `GET /rag/tree`: see `tree_view`. ``depth``, ``nodes``, ``namespace``.
- `POST /rag/invalidate`: the documents of a `selector`. Answers what was removed, see
  `retirement.Removed`; 404 when a document that was named is neither in the tree nor in files, 500
  with the answer under ``removed`` when files couldn't be removed.
- `POST /rag/pin` ``{"id", "version", "tier", "ttl_s"}``: keep a document that is
  cached, with its prefixes, in ``tier`` ("device", the default, or "host"), for ``ttl_s`` seconds
  or for good. Answers ``{"places": n}``; 404 when it isn't cached, 409 when the tier's budget
  doesn't reach.
- `POST /rag/unpin` ``{"id", "version"}``: answers ``{"pins": n}``, how many were given
  up; 404 when there was none.
- `GET /rag/pins`: the pins, with ``expires_in_s``, and what of each tier's budget they take.
- `POST /rag/warm` ``{"prefix", "documents", "tokens_per_s", "cache_salt", "extra_key",
  "salt_from"}``: compute documents in the background, see `warming.parse_order`; 409 while another
  order is being carried out, or where speculations are off. Answers the progress, as does
  `GET /rag/warm`; `DELETE /rag/warm` leaves the rest. With several HTTP workers each knows its own
  orders.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from sglang.srt.utils.auth import AuthLevel, auth_level

from rag_radix.control.actions import (
    EXPIRE_ACTION,
    INVALIDATE_ACTION,
    PIN_ACTION,
    PINS_ACTION,
    TREE_ACTION,
    UNDO_PIN_ACTION,
    UNPIN_ACTION,
)
from rag_radix.control.documents import parse_page, survey
from rag_radix.control.pins import parse_tier, parse_ttl
from rag_radix.control.selector import (
    MAX_BODY_BYTES,
    NAMESPACE_FIELDS,
    parse_object,
    parse_selector,
)
from rag_radix.control.tree_view import parse_view
from rag_radix.control.warming import FIELDS as WARM_FIELDS
from rag_radix.control.warming import MAX_BODY_BYTES as MAX_WARM_BYTES
from rag_radix.control.warming import Generate, Warming, parse_order
from rag_radix.errors import (
    ControlError,
    IncompleteError,
    RefusedError,
    RpcError,
    TooLargeError,
    UnknownDocumentError,
)
from rag_radix.http_body import read_body
from rag_radix.names import POOL_ACTION

logger = logging.getLogger(__name__)

DOCUMENTS_PATH = "/rag/documents"
TREE_PATH = "/rag/tree"
INVALIDATE_PATH = "/rag/invalidate"
PIN_PATH = "/rag/pin"
UNPIN_PATH = "/rag/unpin"
PINS_PATH = "/rag/pins"
WARM_PATH = "/rag/warm"

Call = Callable[[str, Any], Awaitable[list[Any]]]
_Handler = Callable[[Request], Awaitable[Any]]


def add_control_routes(app: FastAPI, call: Call, generate: Generate) -> None:
    """Add the routes to SGLang's app.

    Args:
        app: The app.
        call: Calls an action of the schedulers (`rpc.Caller.call`).
        generate: Sends a document that is to be warmed (`warming.generator`).
    """

    async def documents(request: Request) -> Any:
        page = parse_page(request.query_params)
        asked, answers = survey(page), None
        while True:
            try:
                action, body = next(asked) if answers is None else asked.send(answers)
            except StopIteration as done:
                return merged(done.value)
            answers = await call(action, body)

    async def tree(request: Request) -> Any:
        view = parse_view(request.query_params)
        return merged(await call(TREE_ACTION, asdict(view)))

    async def invalidate(request: Request) -> Any:
        body = parse_object(
            await read_body(request, MAX_BODY_BYTES),
            ("id", "version", "prefix", "all", *NAMESPACE_FIELDS),
        )
        selector = parse_selector(body)
        ranks = await call(INVALIDATE_ACTION, selector.as_json())
        if selector.id is not None and not any(map(_is_something, ranks)):
            raise UnknownDocumentError(f"{selector.description} isn't cached")
        log_action("invalidate", request, **selector.as_json(), removed=[_brief(r) for r in ranks])
        if left := [rank["storage"] for rank in ranks if _is_left(rank["storage"])]:
            raise IncompleteError(_what_is_left(left), merged(ranks))
        return merged(ranks)

    async def pin(request: Request) -> Any:
        body = parse_object(
            await read_body(request, MAX_BODY_BYTES),
            ("id", "version", "tier", "ttl_s", *NAMESPACE_FIELDS),
        )
        selector, tier, ttl_s = parse_selector(body), parse_tier(body), parse_ttl(body)
        expires_s = None if ttl_s is None else time.monotonic() + ttl_s
        order = {"selector": selector.as_json(), "tier": tier, "expires_s": expires_s}
        answers = await call(PIN_ACTION, order)
        refusals = list(dict.fromkeys(each["refused"] for each in answers if "refused" in each))
        earlier = {
            str(each["rank"]): _lasting(each["earlier"]) for each in answers if each["places"]
        }
        if refusals and earlier:
            undo = {"selector": selector.as_json(), "earlier": earlier}
            await call(UNDO_PIN_ACTION, undo)
        if refusals:
            raise RefusedError("; ".join(refusals))
        ranks = [{"places": each["places"]} for each in answers]
        if not any(rank["places"] for rank in ranks):
            raise UnknownDocumentError(f"{selector.description} isn't cached")
        if expires_s is not None:
            expiries.plan(expires_s)
        log_action("pin", request, **selector.as_json(), tier=tier, ttl_s=ttl_s, ranks=ranks)
        return merged(ranks)

    async def unpin(request: Request) -> Any:
        selector = parse_selector(
            parse_object(
                await read_body(request, MAX_BODY_BYTES), ("id", "version", *NAMESPACE_FIELDS)
            )
        )
        ranks = await call(UNPIN_ACTION, selector.as_json())
        if not any(ranks):
            raise UnknownDocumentError(f"{selector.description} isn't pinned")
        log_action("unpin", request, **selector.as_json(), pins=ranks)
        return merged([{"pins": rank} for rank in ranks])

    async def pins(_request: Request) -> Any:
        ranks = await call(PINS_ACTION, None)
        for each in (each for rank in ranks for each in rank["pins"]):
            expires_s = each.pop("expires_s")
            left_s = None if expires_s is None else max(expires_s - time.monotonic(), 0.0)
            each["expires_in_s"] = left_s
        return merged(ranks)

    async def warm(request: Request) -> Any:
        body = parse_object(await read_body(request, MAX_WARM_BYTES), WARM_FIELDS)
        order = parse_order(body)
        if not any(pool["max_prefill_bs"] for pool in await call(POOL_ACTION, None)):
            raise RefusedError(
                "documents are warmed by speculations, which max_prefill_bs=0 in "
                "--radix-eviction-policy-config refuses: raise it"
            )
        warming.start(order)
        log_action("warm", request, documents=len(order.documents))
        return asdict(warming.progress)

    async def warm_progress(_request: Request) -> Any:
        return asdict(warming.progress)

    async def warm_stop(request: Request) -> Any:
        warming.stop()
        log_action("stop warming", request)
        return asdict(warming.progress)

    warming = Warming(generate)
    expiries = Expiries(call)
    for path, handler, method in (
        (DOCUMENTS_PATH, documents, "GET"),
        (TREE_PATH, tree, "GET"),
        (INVALIDATE_PATH, invalidate, "POST"),
        (PIN_PATH, pin, "POST"),
        (UNPIN_PATH, unpin, "POST"),
        (PINS_PATH, pins, "GET"),
        (WARM_PATH, warm, "POST"),
        (WARM_PATH, warm_progress, "GET"),
        (WARM_PATH, warm_stop, "DELETE"),
    ):
        app.add_api_route(path, _answering(handler), methods=[method])


class Expiries:
    """Tells the schedulers when pins end: this process's clock decides for all ranks."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._tasks: set[asyncio.Task[None]] = set()

    def plan(self, expires_s: float) -> None:
        """Let pins end at `expires_s` on the monotonic clock."""
        task = asyncio.create_task(self._expire(expires_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _expire(self, expires_s: float) -> None:
        await asyncio.sleep(expires_s - time.monotonic())
        try:
            ranks = await self._call(EXPIRE_ACTION, max(expires_s, time.monotonic()))
        except RpcError as error:
            logger.error("Control: pins didn't end: %s", error)
            return
        logger.info("Control: %s", json.dumps({"action": "expire pins", "pins": ranks}))


def _answering(handler: _Handler) -> Callable[..., Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return _json(await handler(request))
        except UnknownDocumentError as error:
            return _json({"error": {"message": str(error)}}, 404)
        except RefusedError as error:
            return _json({"error": {"message": str(error)}}, 409)
        except TooLargeError as error:
            return _json({"error": {"message": str(error)}}, 413)
        except ControlError as error:
            return _json({"error": {"message": str(error)}}, 400)
        except RpcError as error:
            return _json({"error": {"message": str(error)}}, 500)
        except IncompleteError as error:
            return _json({"error": {"message": str(error)}, "removed": error.done}, 500)

    auth_level(AuthLevel.ADMIN_OPTIONAL)(answer)
    return answer


def merged(ranks: list[Any]) -> Any:
    """The answers of all data-parallel ranks as one."""
    return ranks[0] if len(ranks) == 1 else {"ranks": ranks}


def log_action(action: str, request: Request, **fields: Any) -> None:
    """One line for each action that changes state: JSON, in which ids are escaped."""
    client = request.client.host if request.client else None
    # In ASCII, since an id is whatever a client made of it.
    logger.info("Control: %s", json.dumps({"action": action, "client": client, **fields}))


def _lasting(pin: dict[str, Any] | None) -> dict[str, Any] | None:
    """`pin`, unless it has ended by now: the call that ends it has been made."""
    if pin is not None and pin["expires_s"] is not None and pin["expires_s"] <= time.monotonic():
        return None
    return pin


def _brief(removed: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in removed.items() if name != "paths"}


def _is_something(removed: dict[str, Any]) -> bool:
    """Whether an invalidation has found anything."""
    storage = removed["storage"]
    stored = storage is not None and (storage["files"] or _is_left(storage))
    return bool(removed["places"] or removed["requests"] or stored)


def _is_left(storage: dict[str, Any] | None) -> bool:
    return storage is not None and not (storage["is_read"] and storage["left_files"] == 0)


def _what_is_left(storages: list[dict[str, Any]]) -> str:
    directory, files = storages[0]["directory"], sum(each["left_files"] for each in storages)
    what = f"{files} files in {directory} couldn't be removed"
    if not files:
        what = f"{directory} couldn't be read, so files that other servers have just written are"
        what += " there as before"
    return (
        f"the documents have gone from memory, and this server reads them no more, but {what}: a "
        "server that starts with them serves them again. Removal is tried again while this one "
        "runs; repeat the call when the directory can be written, or remove by hand the files that "
        "the log names"
    )


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
