"""What the routes answer, whatever the schedulers say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from rag_radix import http_routes
from rag_radix.errors import RpcError
from rag_radix.http_routes import MAX_ORDER_BYTES, add_routes, assemble, parse_rids


def client(*ranks: Any, states: dict[str, Any] | None = None) -> TestClient:
    """A server whose schedulers answer every call with `ranks`, or raise what is one of them."""

    async def call(action: str, body: Any) -> list[Any]:
        for rank in ranks:
            if isinstance(rank, Exception):
                raise rank
        return list(ranks)

    app = FastAPI()
    add_routes(app, lambda: SimpleNamespace(rid_to_state=states or {}), call)
    return TestClient(app)


def test_one_rank_stands_at_the_top_level() -> None:
    answer = assemble([{"rag_radix": {"documents": 3}, "other": 1}])
    assert answer["documents"] == 3
    assert set(answer) == {"documents", "door"}


def test_several_ranks_are_listed() -> None:
    answer = assemble([{"rag_radix": {"documents": 3}}, {"rag_radix": {"documents": 4}}])
    assert answer["ranks"] == [{"documents": 3}, {"documents": 4}]


def test_a_scheduler_without_a_knowledge_tree_is_an_error() -> None:
    with pytest.raises(HTTPException, match="no knowledge tree"):
        assemble([{"rag_radix": {}}, {}])


def test_of_several_ranks_the_one_that_knows_a_speculation_answers() -> None:
    ranks = [{"a": "unknown", "b": "finished", "c": "unknown"}, {"a": "running", "b": "unknown"}]
    ranks[1]["c"] = "unknown"
    reply = client(*ranks).post("/rag/promote", json={"rids": ["a", "b", "c"]})
    assert reply.json() == {"rids": {"a": "running", "b": "finished", "c": "unknown"}}


def test_of_several_ranks_the_one_with_the_shortest_queue_says_whether_there_is_room() -> None:
    full = {"waiting": 9, "max_prefill_bs": 4, "accepts": False}
    free = {"waiting": 1, "max_prefill_bs": 4, "accepts": True}
    assert client(full, free).get("/rag/pool").json() == free


@pytest.mark.filterwarnings("ignore:ORJSONResponse")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/rag/stats"),
        ("POST", "/rag/promote"),
        ("GET", "/rag/pool"),
        ("POST", "/rag/order"),
        ("POST", "/rag/place"),
    ],
)
def test_what_programs_ask_needs_the_ordinary_key(method: str, path: str) -> None:
    app = client(RpcError("asked")).app
    add_api_key_middleware(app, api_key="user", admin_api_key="admin")
    server = TestClient(app, raise_server_exceptions=False)

    def admits(key: str | None) -> bool:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        reply = server.request(method, path, headers=headers, content=b"")
        return reply.status_code != 401

    assert [admits(key) for key in (None, "admin", "user")] == [False, False, True]


@pytest.mark.parametrize("path", ["/rag/promote", "/rag/order", "/rag/place"])
def test_a_body_that_is_too_large_is_refused(path: str) -> None:
    reply = client().post(path, content=b"[" * (MAX_ORDER_BYTES + 1))
    assert reply.status_code == 413
    assert "bytes, the most allowed" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), [("post", "/rag/promote"), ("get", "/rag/pool")])
def test_what_a_scheduler_could_not_do_is_a_server_error(method: str, path: str) -> None:
    body = {"json": {"rids": ["a"]}} if method == "post" else {}
    reply = client(RpcError("out of order")).request(method, path, **body)
    assert reply.status_code == 500
    assert reply.json() == {"error": {"message": "out of order"}}


def test_a_promotion_waits_for_a_request_that_is_still_being_tokenized() -> None:
    class State:
        finished = False
        asked = 0

        @property
        def dispatched(self) -> bool:
            self.asked += 1
            return self.asked > 3

    state = State()
    client({"a": "running"}, states={"a": state}).post("/rag/promote", json={"rids": ["a"]})
    assert state.asked == 4


def test_a_promotion_does_not_wait_for_a_request_that_could_not_be_tokenized() -> None:
    class State:
        finished = False

        @property
        def dispatched(self) -> bool:
            states.pop("a", None)  # as SGLang drops it, without a mark
            return False

    states: dict[str, Any] = {"a": State()}
    reply = client({"a": "unknown"}, states=states).post("/rag/promote", json={"rids": ["a"]})
    assert reply.json() == {"rids": {"a": "unknown"}}


def test_a_promotion_does_not_wait_for_ever_for_a_request_that_stays_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_routes, "_DISPATCH_S", 0.01)
    states = {"a": SimpleNamespace(finished=False, dispatched=False)}
    reply = client({"a": "unknown"}, states=states).post("/rag/promote", json={"rids": ["a"]})
    assert reply.json() == {"rids": {"a": "unknown"}}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "isn't JSON"),
        (b"\xff", "isn't JSON"),
        (b"[]", '"rids" alone'),
        (b'{"rids": [], "rid": 1}', '"rids" alone'),
        (b'{"rids": "a"}', "array of strings"),
        (b'{"rids": [1]}', "array of strings"),
        (b'{"rids": [""]}', "array of strings"),
        (b'{"rids": [' + b'"x",' * 1024 + b'"x"]}', "at most 1024"),
        (b'{"rids": ["' + b"x" * 513 + b'"]}', "has 513 characters, at most 512"),
    ],
)
def test_malformed_promotions_are_named(body: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_rids(body)
    reply = client({}).post("/rag/promote", content=body)
    assert reply.status_code == 400
    assert named in reply.json()["error"]["message"]
