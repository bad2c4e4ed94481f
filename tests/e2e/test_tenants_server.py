"""Tenants on one server of two ranks: what is public is shared, what is private never."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pydoc_data.topics import topics
from typing import Any

import pytest
import sglang as sgl
from breaking_proxy import BreakingProxy
from e2e.cpu_server import Server, running_server
from e2e.exactness import assert_intact
from e2e.tiny_model import make_tiny_llama
from rag_radix_frontend import CallableRetriever, Document, RagEndpoint, Retries, rag_retrieve

from rag_radix.statistics import DocumentKey

pytestmark = [pytest.mark.server, pytest.mark.slow]

PAGE = 16
FLAGS = ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
FLAGS += ["--max-total-tokens", "2048", "--hicache-ratio", "2", "--context-length", "1024"]
FLAGS += ["--page-size", str(PAGE), "--chunked-prefill-size", "128", "--tp-size", "2"]
FLAGS += ["--chat-template", "chatml", "--dtype", "float32", "--enable-metrics"]
FLAGS += ["--enable-cache-report"]
FLAGS += ["--radix-eviction-policy-config", json.dumps({"retire_older_versions": True})]
# Every call into the tree is compared between the ranks, and a difference ends the server.
ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}

GOING_ON = Retries(attempts=4, first_pause_s=0.001, longest_pause_s=0.002, continues=True)
# By document, what it is about.
NAMED = {"public": "assert", "private 2": "while"}
SYSTEM = list(range(300, 332))
PUBLIC_END = 32 + 80


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    with running_server(model, *FLAGS, env=ENV) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(server: Server) -> None:
    server.post("/rag/invalidate", {"all": True})


def one(document: Document) -> CallableRetriever:
    return CallableRetriever(lambda _query, _k: [document])


def body(salt: str | None, salt_from: int | None = 1, private: int = 2, **fields: Any) -> Any:
    """A prompt of the system's text, a public document, a private one and a question."""
    ids = [*SYSTEM, *range(1000, 1080), *range(1000 * private, 1000 * private + 80), 7, 8, 9]
    documents = [
        {"id": "public", "start": 32, "end": 112},
        {"id": f"private {private}", "start": 112, "end": 192},
    ]
    rag = {"documents": documents, "salt_from": salt_from}
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    return {
        "input_ids": ids,
        "sampling_params": {**sampling, "custom_params": {"rag": rag}},
        "cache_salt": salt,
        **fields,
    }


def ask(server: Server, *args: Any, **fields: Any) -> tuple[int, tuple[int, ...]]:
    """Tokens found, and the answer."""
    reply = server.generate(**body(*args, **fields))
    return reply["meta_info"]["cached_tokens"], tuple(reply["output_ids"])


def documents(server: Server, query: str = "") -> list[tuple[str, str]]:
    rows = server.get(f"/rag/documents?sort=id{query}")["documents"]
    return [(row["id"], row["namespace"]) for row in rows]


def namespace(salt: str) -> str:
    return DocumentKey("", cache_salt=salt).namespace


def test_a_private_document_never_hits_for_another_and_public_ones_do(server: Server) -> None:
    cold = ask(server, "one")
    assert cold[0] == 0
    assert ask(server, "two") == (PUBLIC_END, cold[1])
    assert ask(server, None, None) == (PUBLIC_END, cold[1])
    assert ask(server, "three", None) == (0, cold[1])  # a salt alone covers all
    assert ask(server, "one") == (192, cold[1])
    assert ask(server, "two", 2) == (192, cold[1])  # what is public meanwhile: asked without a salt
    assert set(documents(server)) == {
        ("public", ""),
        ("private 2", ""),
        ("private 2", namespace("one")),
        ("private 2", namespace("two")),
        ("public", namespace("three")),
        ("private 2", namespace("three")),
    }


def test_many_tenants_at_once_find_only_what_is_theirs(server: Server) -> None:
    ask(server, None, None, private=3)
    expected = {n: ask(server, None, None, private=n)[1] for n in range(2, 8)}
    server.post("/rag/invalidate", {"all": True})
    jobs = [(f"tenant {n % 5}", n % 6 + 2) for n in range(60)]

    def one(job: tuple[str, int]) -> None:
        salt, private = job
        assert ask(server, salt, private=private)[1] == expected[private]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, jobs))
    for salt in ("tenant 0", "tenant 4"):
        for private in range(2, 8):
            asked = (salt, private) in jobs
            found = ask(server, salt, private=private)[0]
            assert found <= PUBLIC_END or asked
    assert ask(server, "a new one", private=2)[0] <= PUBLIC_END
    assert_intact(server)


def test_texts_and_chats_have_a_salt_from_a_document_on(server: Server) -> None:
    public, private = "The public text. " * 12, "The private text. " * 12
    texts = [{"id": "public", "text": public}, {"id": "private", "text": private}]
    messages = [{"role": "user", "content": public + "\n" + private + "\nWhat?"}]

    def cached(path: str, request: dict[str, Any]) -> int:
        reply = server.post(path, request)
        if "meta_info" in reply:
            return int(reply["meta_info"]["cached_tokens"])
        details = reply["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens", 0))

    def chat(salt: str) -> dict[str, Any]:
        rag = {"documents": texts, "strict": True, "salt_from": 1}
        return {
            "model": "default",
            "messages": messages,
            "max_tokens": 2,
            "custom_params": {"rag": rag},
            "cache_salt": salt,
        }

    spans = [
        {"id": "public", "start": 0, "end": len(public)},
        {"id": "private", "start": len(public), "end": len(public) + len(private)},
    ]

    def text(salt: str) -> dict[str, Any]:
        rag = {"documents": spans, "unit": "char", "salt_from": 1}
        sampling = {"max_new_tokens": 2, "custom_params": {"rag": rag}}
        return {"text": public + private + "What?", "sampling_params": sampling, "cache_salt": salt}

    for path, request in (("/v1/chat/completions", chat), ("/generate", text)):
        server.post("/rag/invalidate", {"all": True})
        first, other, again = (cached(path, request(salt)) for salt in ("one", "two", "one"))
        assert first == 0
        assert 0 < other < again
        assert ("public", "") in documents(server)
        assert ("public", namespace("one")) not in documents(server)


def test_a_stream_that_goes_on_finds_what_is_public_and_its_own_and_counts_once(
    server: Server,
) -> None:
    public, private = (Document(name, topics[topic][:300]) for name, topic in NAMED.items())

    @sgl.function
    def program(s: Any) -> None:
        s += "Read. " + rag_retrieve(one(public), "q", name="p", public=True, speculative=False)
        s += rag_retrieve(one(private), "q", speculative=False)
        s += sgl.gen("answer", max_tokens=24, temperature=0, ignore_eos=True)

    def answer(url: str) -> tuple[str, dict[str, Any]]:
        backend = RagEndpoint(url, strict=True, cache_salt="one", retries=GOING_ON)
        state = program.run(backend=backend, stream=True)
        shown = "".join(state.text_iter("answer"))
        return shown, state.get_meta_info("answer")

    expected, cold = answer(server.url)
    proxy = BreakingProxy(server.url)
    proxy.cuts = [2500]
    before = server.get("/rag/stats")["requests"]["requests"]
    broken, meta_info = answer(proxy.url)
    assert (broken, proxy.cuts) == (expected, [])
    assert meta_info["prompt_tokens"] == cold["prompt_tokens"]
    proxy.close()
    assert server.get("/rag/stats")["requests"]["requests"] == before + 1
    # Nothing of it has come in under the salt from the beginning on.
    assert documents(server) == [("private 2", namespace("one")), ("public", "")]
    nodes = server.get(f"/rag/tree?depth=64&namespace={namespace('one')}")["tree"]["children"]
    assert [node["namespace"] for node in nodes] == [""]


def test_operators_see_and_remove_one_tenant(server: Server) -> None:
    for salt in ("one", "two"):
        ask(server, salt)
    assert documents(server, f"&namespace={namespace('one')}") == [("private 2", namespace("one"))]
    everything, mine = (
        server.get(f"/rag/tree?depth=64{query}")["nodes"]
        for query in ("", f"&namespace={namespace('one')}")
    )
    assert mine < everything
    server.post("/rag/pin", {"id": "private 2", "cache_salt": "two"})
    (pin,) = server.get("/rag/pins")["pins"]
    assert pin["namespace"] == namespace("two")
    assert server.post("/rag/invalidate", {"all": True, "cache_salt": "one"})["places"] == 1
    assert documents(server) == [("private 2", namespace("two")), ("public", "")]
    assert ask(server, "one")[0] == PUBLIC_END
    assert server.post("/rag/unpin", {"id": "private 2", "cache_salt": "two"}) == {"pins": 1}
    warm = {"prefix": body(None)["input_ids"][:112], "cache_salt": "three", "salt_from": 0}
    tokens = list(range(2000, 2080))
    server.post("/rag/warm", {**warm, "documents": [{"id": "private 2", "tokens": tokens}]})
    while server.get("/rag/warm")["state"] == "running":
        time.sleep(0.05)
    assert ask(server, "three")[0] == 192
    assert ask(server, "four")[0] == PUBLIC_END


def test_what_everybody_may_read_names_nobody(server: Server) -> None:
    for salt in ("a secret", "another secret"):
        ask(server, salt, extra_key="a key")
    shown = json.dumps(server.get("/rag/stats")) + json.dumps(server.get("/server_info"))
    shown += server.get("/metrics")
    for hidden in ("secret", "a key", "private 2", namespace("a secret")):
        assert hidden not in shown
    assert "secret" not in server.log()


def test_a_salt_from_without_a_salt_is_refused(server: Server) -> None:
    for request in (body(None), body(""), body(None, stream=True)):
        with pytest.raises(urllib.error.HTTPError) as error:
            server.generate(**request)
        assert error.value.code == 400
        assert "needs a cache_salt" in error.value.read().decode()


def test_calls_of_all_kinds_do_the_same_on_both_ranks(server: Server) -> None:
    rag: dict[str, Any] = {"documents": [{"id": "public", "start": 0, "end": 9}], "unit": "char"}
    order = {"text": "Be brief.", "documents": ["one text", "another text"], "rag": rag}
    assert server.post("/rag/order", order) == {"order": [0, 1], "cached_tokens": 0}
    ask(server, "one")
    salted = {**order, "rag": {**rag, "salt_from": 1}, "cache_salt": "one"}
    assert server.post("/rag/order", salted)["order"] == [0, 1]
    for number in ("1", "2"):
        request = body("one")
        documents_ = request["sampling_params"]["custom_params"]["rag"]["documents"]
        for each in documents_:
            each["version"] = number
        server.generate(**request)
    rows = server.get("/rag/documents?sort=id")["documents"]
    # The public text, which goes with its first version, had no version before.
    assert [(row["id"], row["version"]) for row in rows] == [("private 2", "2"), ("public", "2")]
    removed = server.post("/rag/invalidate", {"id": "private 2", "version": "2"})
    assert removed["places"] == 1
    warm = {"prefix": [7] * 20, "documents": [{"id": "w", "tokens": [9] * 80}] * 50}
    server.post("/rag/warm", {**warm, "tokens_per_s": 200})
    stop = urllib.request.Request(server.url + "/rag/warm", method="DELETE")
    urllib.request.urlopen(stop, timeout=60).close()
    server.post("/rag/invalidate", {"prefix": "w"})
    server.post("/rag/pin", {"id": "public", "tier": "host", "ttl_s": 0.2})
    while server.get("/rag/pins")["pins"]:
        time.sleep(0.05)
    assert server.get("/rag/tree")["nodes"] > 0
    assert_intact(server)


def test_new_weights_empty_the_trees_of_both_ranks(server: Server) -> None:
    ask(server, "one")
    model = server.get("/server_info")["model_path"]
    update = {"model_path": model, "flush_cache": False}
    assert server.post("/update_weights_from_disk", update)["success"]
    assert server.get("/rag/tree")["nodes"] == 0
    assert ask(server, "one")[0] == 0
    assert_intact(server)


def test_clients_that_vanish_leave_nothing_in_use_on_either_rank(server: Server) -> None:
    cold = ask(server, None, None)[1]
    server.post("/rag/invalidate", {"all": True})
    for number in range(12):
        request = body(f"tenant {number % 2}", private=2 + number % 3, stream=True)
        request["sampling_params"]["max_new_tokens"] = 400
        sent = urllib.request.Request(
            server.url + "/generate",
            json.dumps(request).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(sent, timeout=60) as reply:
            assert reply.readline()
    while server.get("/rag/stats")["device"]["locked_tokens"]:
        time.sleep(0.1)
    assert_intact(server)
    assert ask(server, None, None)[1] == cold
