"""The key by which a router keeps requests with the same leading documents together."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sglang as sgl
from breaking_proxy import BreakingProxy
from rag_radix_frontend import ROUTING_HEADER, Document, RagEndpoint, rag_retrieve, routing_key
from rag_radix_frontend.errors import ArgumentError

CATS = Document("animals/cats", "Cats purr.", version="3")
DOGS = Document("animals/dogs", "Dogs bark.")


class Listening(BreakingProxy):
    """Remembers the routing keys of requests, None for those without one."""

    def __init__(self, server_url: str) -> None:
        super().__init__(server_url)
        self.keys: list[str | None] = []

    def hears(self, asked: bytes) -> None:
        if asked.startswith(b"POST /generate "):
            found = re.search(rb"(?i)x-smg-routing-key: (\w+)\r\n", asked)
            self.keys.append(found[1].decode() if found else None)


def test_a_key_stands_for_ids_and_versions_in_their_order() -> None:
    keys = [
        routing_key(documents)
        for documents in (
            [CATS],
            [DOGS],
            [CATS, DOGS],
            [DOGS, CATS],
            [Document("animals/cats", "", version="4")],
            [Document("animals/cats3", "")],
            [Document("animals/cat", "", version="s3")],
        )
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    assert routing_key([Document("animals/cats", "other", version="3")]) == keys[0]
    assert keys[0] == "e10ef4c8e80cda363f24e034c62ed3e4"


@pytest.mark.parametrize(
    ("count", "leading"), [(0, None), (1, [CATS]), (2, [CATS, DOGS]), (9, [CATS, DOGS])]
)
def test_requests_of_a_program_carry_the_key_of_their_leading_documents(
    stub: Any, listed: Any, count: int, leading: list[Document] | None
) -> None:
    proxy = Listening(stub.url)
    backend = RagEndpoint(proxy.url, chat_template_name="chatml", routing_documents=count)

    @sgl.function
    def program(s: Any) -> None:
        s += "Read. " + sgl.gen("before")
        s += rag_retrieve(listed, "animals", speculative=False) + sgl.gen("answer")
        s += sgl.select("kind", ["a", "b"])

    program.run(backend=backend, stream=True).sync()
    key = routing_key(leading) if leading is not None else None
    assert proxy.keys == [None, key, key, key]
    proxy.close()


def test_a_negative_number_of_documents_is_refused(stub: Any) -> None:
    with pytest.raises(ArgumentError, match="routing_documents"):
        RagEndpoint(stub.url, routing_documents=-1)


def test_the_header_is_the_routers() -> None:
    assert ROUTING_HEADER == "X-SMG-Routing-Key"
