"""The operators' routes under `/rag`.

They obey SGLang's rules for administration: the admin key where `--admin-api-key` is set, else the
API key where that is set. With several data-parallel ranks the answers of all stand under
``ranks``. A malformed call gets a 400 that says what is wrong with it, as ``{"error": {"message":
...}}``; nothing has happened then.

- `GET /rag/documents`: see `documents`. ``sort``, ``order``, ``offset``, ``limit``, ``prefix``.
- `GET /rag/tree`: see `tree_view`. ``depth``, ``nodes``.
- `POST /rag/invalidate`: the documents of a `selector`. Answers what was removed, see
  `retirement.Removed`; 404 when a document that was named isn't in the tree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from sglang.srt.utils.auth import AuthLevel, auth_level

from rag_radix.control.actions import DOCUMENTS_ACTION, INVALIDATE_ACTION, TREE_ACTION
from rag_radix.control.documents import parse_page
from rag_radix.control.selector import parse_object, parse_selector
from rag_radix.control.tree_view import parse_view
from rag_radix.errors import ControlError, RpcError, UnknownDocumentError

logger = logging.getLogger(__name__)

DOCUMENTS_PATH = "/rag/documents"
TREE_PATH = "/rag/tree"
INVALIDATE_PATH = "/rag/invalidate"

Call = Callable[[str, Any], Awaitable[list[Any]]]
_Handler = Callable[[Request], Awaitable[Any]]


def add_control_routes(app: FastAPI, call: Call) -> None:
    """Add the routes to SGLang's app; `call` calls an action of the schedulers."""

    async def documents(request: Request) -> Any:
        page = parse_page(request.query_params)
        return merged(await call(DOCUMENTS_ACTION, asdict(page)))

    async def tree(request: Request) -> Any:
        view = parse_view(request.query_params)
        return merged(await call(TREE_ACTION, asdict(view)))

    async def invalidate(request: Request) -> Any:
        body = parse_object(await request.body(), ("id", "version", "prefix", "all", "namespace"))
        selector = parse_selector(body)
        ranks = await call(INVALIDATE_ACTION, selector.as_json())
        if selector.id is not None and not any(r["places"] or r["requests"] for r in ranks):
            raise UnknownDocumentError(f"{selector.description} isn't cached")
        log_action("invalidate", request, **selector.as_json(), removed=[_brief(r) for r in ranks])
        return merged(ranks)

    for path, handler, method in (
        (DOCUMENTS_PATH, documents, "GET"),
        (TREE_PATH, tree, "GET"),
        (INVALIDATE_PATH, invalidate, "POST"),
    ):
        app.add_api_route(path, _answering(handler), methods=[method])


def _answering(handler: _Handler) -> Callable[..., Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return _json(await handler(request))
        except UnknownDocumentError as error:
            return _json({"error": {"message": str(error)}}, 404)
        except ControlError as error:
            return _json({"error": {"message": str(error)}}, 400)
        except RpcError as error:
            return _json({"error": {"message": str(error)}}, 500)

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


def _brief(removed: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in removed.items() if name != "paths"}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
