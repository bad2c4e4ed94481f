"""What operators' routes take, refuse and log."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from rag_radix.control.routes import add_control_routes
from rag_radix.statistics import DocumentKey

REMOVED = {"places": 1, "paths": [["a"]], "requests": 0, "storage": None}
ACCEPTING = {"waiting": 0, "max_prefill_bs": 4, "accepts": True}


def client(*ranks: Any, keys: tuple[str | None, str | None] = (None, None)) -> TestClient:
    """A server whose schedulers answer every call with `ranks`; `.calls` are those it made."""
    calls: list[tuple[str, Any]] = []

    async def call(action: str, body: Any) -> list[Any]:
        calls.append((action, body))
        return list(ranks)

    async def generate(body: dict[str, Any]) -> int:
        if body["text"].endswith("too long"):
            raise ValueError("too many tokens")
        calls.append(("generate", body))
        return len(body["text"])

    app = FastAPI()
    add_control_routes(app, call, generate)
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
        (b'{"id": "a", "cache_salt": 5}', '"cache_salt" must be a string'),
        (b'{"id": "a", "cache_salt": "s", "namespace": "x"}', 'give either "namespace" or'),
        (b'{"id": "a", "version": null}', '"version" must be a string'),
        (b'{"id": "\\ud800"}', "isn't JSON"),
        (b'{"id": "%s"}' % (b"a" * 600), "600 characters"),
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
    nothing = {"places": 0, "paths": [], "requests": 0, "storage": None}
    reply = client(nothing, nothing).post("/rag/invalidate", json={"id": "a", "version": "2"})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "the document 'a' of version '2' isn't cached"
    assert client(nothing).post("/rag/invalidate", json={"all": True}).status_code == 200
    assert client(nothing, REMOVED).post("/rag/invalidate", json={"id": "a"}).status_code == 200


def stored(**fields: Any) -> dict[str, Any]:
    storage = {"directory": "/files", "files": 0, "left_files": 0, "is_read": True, **fields}
    return {"places": 0, "paths": [], "requests": 0, "storage": storage}


def test_what_only_files_had_is_no_unknown_document():
    assert client(stored()).post("/rag/invalidate", json={"id": "a"}).status_code == 404
    reply = client(stored(files=2)).post("/rag/invalidate", json={"id": "a"})
    assert (reply.status_code, reply.json()["storage"]["files"]) == (200, 2)


@pytest.mark.parametrize(
    ("left", "problem"),
    [
        ({"left_files": 3}, "3 files in /files couldn't be removed: a server that starts"),
        ({"is_read": False}, "/files couldn't be read, so files that other servers"),
    ],
)
def test_what_could_not_be_removed_is_an_error_that_says_so_and_what_was(left, problem, caplog):
    whole, broken = REMOVED, stored(**left)
    with caplog.at_level(logging.INFO):
        reply = client(whole, broken).post("/rag/invalidate", json={"id": "a"})
    assert reply.status_code == 500
    assert problem in reply.json()["error"]["message"]
    assert reply.json()["removed"] == {"ranks": [whole, broken]}
    assert '"action": "invalidate"' in caplog.text


def test_an_action_is_logged_on_one_line_in_which_ids_are_escaped(caplog):
    with caplog.at_level(logging.INFO):
        client(REMOVED).post("/rag/invalidate", json={"id": "a\n\x1b[31m\u202e"})
    (line,) = [record.getMessage() for record in caplog.records if "Control" in record.message]
    assert line.isprintable()
    assert r'"id": "a\n\u001b[31m\u202e"' in line
    assert '"action": "invalidate"' in line
    assert '"removed": [{"places": 1, "requests": 0, "storage": null}]' in line


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{}", "exactly one of"),
        (b'{"prefix": "a"}', "'prefix' is unknown"),
        (b'{"id": "a", "tier": "disk"}', '"tier" must be "device" or "host", not \'disk\''),
        (b'{"id": "a", "ttl_s": 0}', '"ttl_s" must be a number of seconds above 0, not 0'),
        (b'{"id": "a", "ttl_s": true}', '"ttl_s" must be'),
        (b'{"id": "a", "ttl_s": 1e300}', '"ttl_s" must be'),
        (b'{"id": "a", "ttl_s": "1"}', '"ttl_s" must be'),
    ],
)
def test_a_malformed_pin_says_what_is_wrong_and_does_nothing(body, problem):
    server = client(pinned(1))
    reply = server.post("/rag/pin", content=body)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]["message"]
    assert server.calls == []


def pinned(places: int, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"places": places, "rank": rank, "earlier": None, **fields}


def test_a_pin_that_one_rank_refuses_is_taken_back_on_the_others():
    lasting = {"selector": {"id": "a"}, "tier": "host", "expires_s": None}
    over = {**lasting, "expires_s": time.monotonic()}
    server = client(
        pinned(0, 3, refused="no room", earlier=lasting),
        pinned(2, 0, earlier=lasting),
        pinned(2, 2, earlier=over),
        pinned(0, 1),
    )
    reply = server.post("/rag/pin", json={"id": "a"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (409, "no room")
    assert [action for action, _ in server.calls] == ["pin", "undo_pin"]
    assert server.calls[1][1] == {"selector": {"id": "a"}, "earlier": {"0": lasting, "2": None}}
    alone = client(pinned(0, refused="no room"))
    assert alone.post("/rag/pin", json={"id": "a"}).status_code == 409
    assert [action for action, _ in alone.calls] == ["pin"]


def test_a_pin_answers_with_its_places():
    assert client(pinned(2)).post("/rag/pin", json={"id": "a"}).json() == {"places": 2}
    both = client(pinned(2, 0), pinned(0, 1)).post("/rag/pin", json={"id": "a"})
    assert both.json() == {"ranks": [{"places": 2}, {"places": 0}]}


def test_what_isnt_cached_or_pinned_is_not_found():
    reply = client(pinned(0)).post("/rag/pin", json={"id": "a"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        404,
        "the document 'a' isn't cached",
    )
    reply = client(0).post("/rag/unpin", json={"id": "a"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        404,
        "the document 'a' isn't pinned",
    )
    assert client(2).post("/rag/unpin", json={"id": "a"}).json() == {"pins": 2}


def test_the_schedulers_are_told_when_a_pin_ends():
    with client(pinned(1)) as server:
        server.post("/rag/pin", json={"id": "a", "ttl_s": 0.05})
        (_, order), *_ = server.calls
        while len(server.calls) == 1:
            server.get("/rag/documents?sort=nothing")  # lets the server's loop run
        action, now_s = server.calls[1]
        assert action == "expire_pins"
        assert now_s >= order["expires_s"]


def test_documents_are_warmed_in_order_in_the_background():
    with client(ACCEPTING) as server:
        documents = [{"id": "a", "text": "one"}, {"id": "b", "version": "2", "text": "two"}]
        documents += [{"id": "c", "text": "too long"}]
        body = {"prefix": "Hi. ", "documents": documents, "tokens_per_s": 1000}
        assert server.post("/rag/warm", json=body).json()["state"] == "running"
        assert server.post("/rag/warm", json=body).status_code == 409
        while (progress := server.get("/rag/warm").json())["state"] == "running":
            pass
        assert progress == {
            "state": "done",
            "documents": 3,
            "warmed": 2,
            "failed": 1,
            "tokens": 14,
            "refusals": 0,
            "problem": "'c': too many tokens",
        }
        sent = [body for action, body in server.calls if action == "generate"]
        assert [each["text"] for each in sent] == ["Hi. one", "Hi. two"]
        rag = sent[1]["sampling_params"]["custom_params"]["rag"]
        assert rag == {
            "documents": [{"id": "b", "version": "2", "start": 4, "end": 7}],
            "unit": "char",
            "speculative": True,
            "salt_from": None,
        }
        slow = {**body, "tokens_per_s": 0.001}
        assert server.post("/rag/warm", json=slow).status_code == 200
        assert server.delete("/rag/warm").json()["state"] == "stopped"
        assert server.post("/rag/warm", json=body).status_code == 200


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, '"documents" must be an array'),
        ({"documents": []}, '"documents" must be an array'),
        ({"documents": [5]}, "documents[0] must be an object"),
        ({"documents": [{"id": "a", "text": "b", "x": 1}]}, "documents[0] must be an object"),
        ({"documents": [{"id": "", "text": "b"}]}, "documents[0].id must be a string"),
        ({"documents": [{"id": "a", "version": 1, "text": "b"}]}, "documents[0].version"),
        ({"documents": [{"id": "a"}]}, "documents[0] needs either text or tokens"),
        ({"documents": [{"id": "a", "text": " "}]}, "documents[0].text"),
        ({"documents": [{"id": "a", "tokens": [-1]}]}, "documents[0].tokens"),
        ({"documents": [{"id": "a", "tokens": []}]}, "documents[0].tokens"),
        ({"prefix": 5, "documents": [{"id": "a", "text": "b"}]}, '"prefix" must be'),
        ({"prefix": [5], "documents": [{"id": "a", "text": "b"}]}, "all of them as tokens"),
        ({"documents": [{"id": "a", "text": "b"}], "tokens_per_s": 0}, '"tokens_per_s" must be'),
        ({"documents": [{"id": "a", "text": "b"}], "cache_salt": 1}, '"cache_salt" must be'),
        (
            {"documents": [{"id": "a", "text": "b"}], "salt_from": 0},
            '"salt_from" must be 0, beside',
        ),
        (
            {"documents": [{"id": "a", "text": "b"}], "cache_salt": "s", "salt_from": 1},
            '"salt_from" must be 0',
        ),
    ],
)
def test_a_malformed_order_to_warm_says_what_is_wrong(body, problem):
    reply = client().post("/rag/warm", json=body)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]["message"]


def test_pins_are_listed_with_the_time_they_have_left():
    now_s = time.monotonic()
    pins = [{"id": "a", "expires_s": now_s + 60}, {"id": "b", "expires_s": None}]
    pins.append({"id": "c", "expires_s": now_s - 1})
    answer = client({"pins": pins, "tiers": {}}).get("/rag/pins").json()
    left = {pin["id"]: pin["expires_in_s"] for pin in answer["pins"]}
    assert 0 < left["a"] <= 60
    assert (left["b"], left["c"]) == (None, 0.0)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/rag/documents?sort=size", "sort='size' must be one of"),
        ("/rag/documents?order=up", "order='up'"),
        ("/rag/documents?limit=0", "limit='0'"),
        ("/rag/documents?limit=1001", "limit='1001'"),
        ("/rag/documents?offset=-1", "offset='-1'"),
        ("/rag/documents?offset=" + "9" * 5000, "offset='999"),
        ("/rag/documents?offset=" + "0" * 12 + "9" * 30, "offset='000"),
        ("/rag/documents?limit=000000000001000000", "limit='000"),
        ("/rag/documents?limit=000000001001", "limit='000"),
        ("/rag/documents?page=1", "'page' is unknown"),
        ("/rag/tree?depth=65", "depth='65'"),
        ("/rag/tree?nodes=%C2%B2", "nodes='²'"),
        ("/rag/tree?nodes=0000000000019999999", "nodes='000"),
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
    assert client({"nodes": 1}).get("/rag/tree").json() == {"nodes": 1}
    both = client({"nodes": 1}, {"nodes": 2}).get("/rag/tree?depth=2")
    assert both.json() == {"ranks": [{"nodes": 1}, {"nodes": 2}]}


def test_a_page_of_documents_is_asked_for_in_two_steps():
    found = {"generation": 0, "known": 1, "total": 1, "found": [[3.0, "a", "", ""]]}
    server = client({"rank": 0, "rows": ["row"], **found})
    page = server.get("/rag/documents?sort=id&limit=3&prefix=a").json()
    assert page == {"total": 1, "offset": 0, "documents": ["row"]}
    (_, look), (_, names) = server.calls
    assert (look["page"]["sort"], look["page"]["prefix"], look["first"]) == ("id", "a", 0)
    assert names == {"0": [("a", "", "")]}


@pytest.mark.filterwarnings("ignore:ORJSONResponse")
@pytest.mark.parametrize("route", [route for route in client().app.routes if "/rag/" in route.path])
def test_operators_need_the_admin_key_where_there_is_one(route):
    (method,) = route.methods

    def admits(server, key):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return server.request(method, route.path, headers=headers, content=b"").status_code != 401

    answer = {"pins": [], "rank": 0, "generation": 0, "known": 0, "total": 0, "found": []}
    keyed = client(answer, keys=("user", "admin"))
    assert [admits(keyed, key) for key in (None, "user", "admin")] == [False, False, True]
    assert not admits(client(answer, keys=(None, "admin")), None)
    alone = client(answer, keys=("user", None))
    assert [admits(alone, key) for key in (None, "user")] == [False, True]


@pytest.mark.parametrize("path", ["/rag/invalidate", "/rag/pin", "/rag/unpin"])
def test_a_body_that_is_too_large_is_refused_before_it_is_in_memory(path):
    def body():
        for _ in range(1 << 10):
            sent.append(1)
            yield b"[" * (1 << 16)

    sent: list[int] = []
    server = client(REMOVED)
    reply = server.post(path, content=body())
    assert reply.status_code == 413
    assert "more than 1,048,576 bytes" in reply.json()["error"]["message"]
    assert server.calls == []


def test_nothing_is_warmed_where_speculations_are_off():
    body = {"prefix": "Hi. ", "documents": [{"id": "a", "text": "one"}]}
    with client({**ACCEPTING, "max_prefill_bs": 0}) as server:
        reply = server.post("/rag/warm", json=body)
        assert reply.status_code == 409
        assert "max_prefill_bs=0" in reply.json()["error"]["message"]
        assert server.get("/rag/warm").json()["documents"] == 0


def test_a_salt_is_neither_passed_on_nor_logged(caplog):
    server = client(REMOVED)
    body = {"id": "a", "cache_salt": "secret", "extra_key": "key"}
    with caplog.at_level(logging.INFO):
        assert server.post("/rag/invalidate", json=body).status_code == 200
    ((_, selector),) = server.calls
    assert selector == {"id": "a", "namespace": DocumentKey("a", "", "key", "secret").namespace}
    assert "secret" not in caplog.text
