"""What operators' routes take, refuse and log."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from rag_radix.control.routes import add_control_routes

REMOVED = {"places": 1, "paths": [["a"]], "requests": 0}


def client(*ranks: Any, keys: tuple[str | None, str | None] = (None, None)) -> TestClient:
    """A server whose schedulers answer every call with `ranks`; `.calls` are those it made."""
    calls: list[tuple[str, Any]] = []

    async def call(action: str, body: Any) -> list[Any]:
        calls.append((action, body))
        return list(ranks)

    app = FastAPI()
    add_control_routes(app, call)
    if any(keys):
        add_api_key_middleware(app, api_key=keys[0], admin_api_key=keys[1])
    test_client = TestClient(app)
    test_client.calls = calls  # type: ignore[attr-defined]
    return test_client


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "isn't JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "exactly one of"),
        (b'{"id": "a", "all": true}', "exactly one of"),
        (b'{"id": "a", "what": 1}', "'what' is unknown"),
        (b'{"id": 5}', '"id" must be a string, not 5'),
        (b'{"id": ""}', '"id" must not be empty'),
        (b'{"prefix": ""}', '"prefix" must not be empty'),
        (b'{"all": 1}', '"all" must be true'),
        (b'{"prefix": "a", "version": "1"}', '"version" needs an "id"'),
        (b'{"id": "a", "version": null}', '"version" must be a string'),
        (b'{"id": "\\ud800"}', "isn't JSON"),
        (b'{"id": "%s"}' % (b"a" * 600), "600 characters"),
        (b'{"id": "a", "x": "%s"}' % (b"a" * (1 << 20)), "bytes"),
        (b"[" * 100_000, "isn't JSON"),
    ],
)
def test_a_malformed_invalidation_says_what_is_wrong_and_does_nothing(body, problem):
    server = client(REMOVED)
    reply = server.post("/rag/invalidate", content=body)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]["message"]
    assert server.calls == []


def test_an_unknown_document_is_not_found():
    nothing = {"places": 0, "paths": [], "requests": 0}
    reply = client(nothing, nothing).post("/rag/invalidate", json={"id": "a", "version": "2"})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "the document 'a' of version '2' isn't cached"
    assert client(nothing).post("/rag/invalidate", json={"all": True}).status_code == 200
    assert client(nothing, REMOVED).post("/rag/invalidate", json={"id": "a"}).status_code == 200


def test_an_action_is_logged_on_one_line_in_which_ids_are_escaped(caplog):
    with caplog.at_level(logging.INFO):
        client(REMOVED).post("/rag/invalidate", json={"id": "a\n\x1b[31m\u202e"})
    (line,) = [record.getMessage() for record in caplog.records if "Control" in record.message]
    assert line.isprintable()
    assert r'"id": "a\n\u001b[31m\u202e"' in line
    assert '"action": "invalidate"' in line
    assert '"removed": [{"places": 1, "requests": 0}]' in line


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/rag/documents?sort=size", "sort='size' must be one of"),
        ("/rag/documents?order=up", "order='up'"),
        ("/rag/documents?limit=0", "limit='0'"),
        ("/rag/documents?limit=1001", "limit='1001'"),
        ("/rag/documents?offset=-1", "offset='-1'"),
        ("/rag/documents?offset=" + "9" * 5000, "offset='999"),
        ("/rag/documents?page=1", "'page' is unknown"),
        ("/rag/tree?depth=65", "depth='65'"),
        ("/rag/tree?nodes=%C2%B2", "nodes='²'"),
        ("/rag/tree?limit=1", "'limit' is unknown"),
    ],
)
def test_a_malformed_query_says_what_is_wrong(path, problem):
    server = client({})
    reply = server.get(path)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]["message"]
    assert server.calls == []


def test_data_parallel_ranks_answer_side_by_side():
    assert client({"total": 1}).get("/rag/documents").json() == {"total": 1}
    both = client({"total": 1}, {"total": 2}).get("/rag/documents?sort=id&limit=3&prefix=a")
    assert both.json() == {"ranks": [{"total": 1}, {"total": 2}]}


@pytest.mark.filterwarnings("ignore:ORJSONResponse")
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/rag/documents"), ("GET", "/rag/tree"), ("POST", "/rag/invalidate")],
)
def test_operators_need_the_admin_key_where_there_is_one(method, path):
    def status(server, key):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return server.request(method, path, headers=headers, json={"id": "a"}).status_code

    keyed = client(REMOVED, keys=("user", "admin"))
    assert [status(keyed, key) for key in (None, "user", "admin")] == [401, 401, 200]
    assert keyed.calls != []
    assert status(client(REMOVED, keys=(None, "admin")), None) == 401
    assert [status(client(REMOVED, keys=("user", None)), key) for key in (None, "user")] == [
        401,
        200,
    ]
