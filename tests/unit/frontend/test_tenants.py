"""Programs of a tenant: what they send of the salt, and where it begins."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import sglang as sgl
from openai import AsyncOpenAI
from rag_radix_frontend import RagEndpoint, rag_retrieve, retrieve_and_generate
from rag_radix_frontend.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:Error in stream_executor")


@pytest.fixture
def backend(stub: Any) -> RagEndpoint:
    return RagEndpoint(stub.url, chat_template_name="chatml", cache_salt="secret")


@sgl.function
def answer(s: Any, retriever: Any) -> None:
    s += "Read.\n"
    s += rag_retrieve(retriever, "animals", name="public", public=True)
    s += "What about "
    s += sgl.gen("query", max_tokens=4)
    s += rag_retrieve(retriever, "space", name="private")
    s += sgl.select("kind", ["a", "b"])


def salt_from(params: dict[str, Any]) -> int | None:
    value: int | None = params["custom_params"]["rag"].get("salt_from")
    return value


def test_a_salt_begins_behind_the_public_documents(
    backend: RagEndpoint, stub: Any, listed: Any
) -> None:
    state = answer.run(retriever=listed, backend=backend)
    assert state.error() is None
    query, *selects = stub.asked
    assert all(body["cache_salt"] == "secret" for body in stub.asked)
    assert salt_from(query["sampling_params"]) == 2
    for select in selects:
        params = select["sampling_params"]
        for one in params if isinstance(params, list) else [params]:
            assert len(one["custom_params"]["rag"]["documents"]) == 3
            assert salt_from(one) == 2


def test_a_salt_covers_all_of_a_prompt_without_public_documents(
    backend: RagEndpoint, stub: Any, listed: Any
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Who? " + sgl.gen("name") + rag_retrieve(listed, "animals") + sgl.gen("answer")

    assert program.run(backend=backend).error() is None
    assert [body["cache_salt"] for body in stub.asked] == ["secret"] * 2
    assert salt_from(stub.asked[1]["sampling_params"]) is None


def test_without_a_salt_public_documents_are_like_others(stub: Any, listed: Any) -> None:
    backend = RagEndpoint(stub.url, chat_template_name="chatml")
    assert answer.run(retriever=listed, backend=backend).error() is None
    assert all("cache_salt" not in body for body in stub.asked)
    assert salt_from(stub.asked[0]["sampling_params"]) is None


def test_what_is_public_comes_first(backend: RagEndpoint, listed: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "space")
        s += rag_retrieve(listed, "animals", name="late", public=True)
        s += sgl.gen("answer")

    with pytest.raises(
        ArgumentError, match=r"'late' is to be public.*retrieve what is public first"
    ):
        raise program.run(backend=backend).error()


def test_prefixes_of_programs_are_cached_for_the_tenant_alone(
    backend: RagEndpoint, stub: Any
) -> None:
    backend.cache_prefix("You are")
    assert stub.asked[-1]["cache_salt"] == "secret"


@pytest.mark.parametrize(
    ("salt", "public", "begins"), [("s", True, 2), ("s", False, None), (None, True, None)]
)
def test_a_chat_about_public_documents_is_salted_behind_them(
    listed: Any, salt: str | None, public: bool, begins: int | None
) -> None:
    asked: list[dict[str, Any]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": []})

    client = AsyncOpenAI(
        base_url="http://server/v1",
        api_key="none",
        http_client=httpx.AsyncClient(transport=httpx.MockTransport(serve)),
    )

    async def ask() -> None:
        await retrieve_and_generate(
            client,
            listed,
            "animals",
            lambda found: [{"role": "user", "content": "".join(each.text for each in found)}],
            speculative=False,
            model="default",
            public=public,
            extra_body={"cache_salt": salt} if salt else None,
        )

    asyncio.run(ask())
    (body,) = asked
    assert body.get("cache_salt") == salt
    assert salt_from(body) == begins
