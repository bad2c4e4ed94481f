"""Programs with `rag_retrieve()` on the real server, with real embeddings and a real index."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import orjson
import pytest
import sglang as sgl
from e2e.cpu_server import Server
from e2e.waiting import until
from openai import AsyncOpenAI, OpenAI
from rag_radix_frontend import (
    FaissRetriever,
    RagEndpoint,
    RetrievalReport,
    Stage,
    annotate,
    build_index,
    rag_retrieve,
    retrieve_and_generate,
)
from rag_radix_frontend.errors import RequestAborted, RequestError

from rag_radix.statistics import namespace_name

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore:Error in stream_executor"),
]

QUESTION = "How does the with statement work?"


@pytest.fixture(scope="module")
def backend(server: Server) -> RagEndpoint:
    return RagEndpoint(server.url, chat_template_name="chatml", strict=True)


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> FaissRetriever:
    folder = tmp_path_factory.mktemp("frontend")
    with (folder / "topics.jsonl").open("wb") as out:
        for name in sorted(topics):
            line = {"id": name, "version": "3.11", "text": topics[name][:600]}
            out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    build_index(folder / "topics.jsonl", folder / "index")
    return FaissRetriever.open(folder / "index")


@pytest.fixture(autouse=True)
def empty_cache(server: Server) -> None:
    server.flush_cache()


@sgl.function
def answer(s: Any, retriever: FaissRetriever, question: str, k: int = 2) -> None:
    s += sgl.system("Answer from the documents.")
    s += sgl.user(rag_retrieve(retriever, question, k=k) + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=8, temperature=0))


def cached_tokens(state: Any, name: str = "answer") -> int:
    count: int = state.get_meta_info(name)["cached_tokens"]
    return count


def test_documents_of_a_program_become_nodes_of_the_tree(
    server: Server, backend: RagEndpoint, retriever: FaissRetriever
) -> None:
    state = answer.run(retriever=retriever, question=QUESTION, backend=backend)
    assert state["answer"]
    assert "with" in state["docs"].ids
    assert server.get("/rag/stats")["device"]["documents"] == 2


def test_the_same_documents_are_read_once_whatever_is_asked(
    backend: RagEndpoint, retriever: FaissRetriever
) -> None:
    @sgl.function
    def ask(s: Any, question: str) -> None:
        s += rag_retrieve(retriever, QUESTION, k=2) + question + sgl.gen("answer", max_tokens=2)

    first = ask.run(question="What is it?", backend=backend)
    assert cached_tokens(first) == 0
    second = ask.run(question="Who wrote it?", backend=backend)
    documents_tokens = first.get_meta_info("answer")["prompt_tokens"] - 10
    assert cached_tokens(second) >= documents_tokens


def test_streaming_gives_the_same_answer(backend: RagEndpoint, retriever: FaissRetriever) -> None:
    arguments = {"retriever": retriever, "question": QUESTION, "backend": backend}
    whole = answer.run(**arguments)["answer"]
    assert "".join(answer.run(**arguments, stream=True).text_iter("answer")) == whole


def test_two_hops_and_forks_and_a_choice(
    server: Server, backend: RagEndpoint, retriever: FaissRetriever
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(retriever, QUESTION, k=1, name="first")
        s += "In one word: " + sgl.gen("hop", max_tokens=3, temperature=0)
        s += rag_retrieve(retriever, "exceptions", k=1, name="second")
        forks = s.fork(2)
        forks += lambda i: f"Question {i}: " + sgl.gen("part", max_tokens=3, temperature=0)
        forks.join()
        s += "The topic is " + sgl.select("topic", ["cooking", "Python"])

    def requests() -> int:
        count: int = server.get("/rag/stats")["requests"]["requests"]
        return count

    before = requests()
    state = program.run(backend=backend)
    assert state["topic"] in ("cooking", "Python")
    assert len(state["part"]) == 2
    assert state.error() is None
    # The hop, what the forks share and the choice.
    assert requests() == before + 3


def test_a_batch_answers_as_one_by_one(backend: RagEndpoint, retriever: FaissRetriever) -> None:
    questions = [QUESTION, "What is a list?", "What does raise do?", QUESTION]
    arguments = [{"retriever": retriever, "question": q} for q in questions]
    batch = [state["answer"] for state in answer.run_batch(arguments, backend=backend)]
    assert batch == [answer.run(**a, backend=backend)["answer"] for a in arguments]


def test_several_samples_come_as_a_list(backend: RagEndpoint, retriever: FaissRetriever) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(retriever, QUESTION) + sgl.gen("answer", n=2, max_tokens=3)

    assert len(program.run(backend=backend)["answer"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_ends_a_long_generation(
    server: Server, backend: RagEndpoint, retriever: FaissRetriever, stream: bool
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(retriever, QUESTION)
        s += sgl.gen("answer", max_tokens=3000, ignore_eos=True)

    state = program.run(backend=backend, stream=stream)
    until(lambda: server.get("/rag/stats")["device"]["locked_tokens"])
    backend.cancel(state)
    with pytest.raises(RequestAborted):
        list(state.text_iter("answer"))
    assert server.generate(text="Hello", sampling_params={"max_new_tokens": 2})["text"]


def test_a_stock_endpoint_runs_the_program(
    server: Server, backend: RagEndpoint, retriever: FaissRetriever
) -> None:
    stock = sgl.RuntimeEndpoint(server.url, chat_template_name="chatml")
    arguments = {"retriever": retriever, "question": QUESTION}
    with pytest.warns(UserWarning, match="RuntimeEndpoint doesn't tell"):
        assert answer.run(**arguments, backend=stock)["answer"]
    assert server.get("/rag/stats")["device"]["documents"] == 0


def test_chat_completions_take_annotated_messages(
    server: Server, retriever: FaissRetriever
) -> None:
    documents = [retriever.store.by_id(name) for name in ("with", "raise")]
    quoted = "\n\n".join(document.text for document in documents)
    messages = [{"role": "user", "content": f"{quoted}\n\n{QUESTION}"}]
    body = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0}
    reply = server.post("/v1/chat/completions", body | annotate(messages, documents, strict=True))
    assert reply["choices"][0]["message"]["content"]
    assert server.get("/rag/stats")["device"]["documents"] == 2


class Twice:
    """The other retriever's documents, provisionally and, when the test says so, finally."""

    def __init__(self, retriever: FaissRetriever, *, reverse: bool = False) -> None:
        self._retriever = retriever
        self._reverse = reverse
        self.go_on = threading.Event()

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        (*_, final) = self._retriever.retrieve(query, k)
        first = final.documents[::-1] if self._reverse else final.documents
        yield Stage(first, final=False)
        assert self.go_on.wait(60)
        yield final


@pytest.mark.parametrize("order", ["canonical", "cached_first"])
def test_documents_in_another_order_are_found_cached(
    backend: RagEndpoint, retriever: FaissRetriever, order: Any
) -> None:
    @sgl.function
    def ask(s: Any, retriever: Any, order: Any) -> None:
        s += "Read.\n\n"
        s += rag_retrieve(retriever, QUESTION, k=3, order=order, speculative=False)
        s += sgl.gen("answer", max_tokens=4, temperature=0)

    class Reversed:
        def retrieve(self, query: str, k: int) -> Iterator[Stage]:
            for documents, final in retriever.retrieve(query, k):
                yield Stage(documents[::-1], final)

    first = ask.run(retriever=Reversed(), order="canonical", backend=backend)
    assert first.error() is None
    again = ask.run(retriever=retriever, order=order, backend=backend)
    assert again["docs"] == first["docs"]
    assert cached_tokens(again) >= again.get_meta_info("answer")["prompt_tokens"] - 1
    other = ask.run(retriever=Reversed(), order="score", backend=backend)
    if other["docs"] != first["docs"]:
        assert cached_tokens(other) < cached_tokens(again)


def test_tenants_share_public_documents_and_nothing_that_follows_them(
    server: Server, retriever: FaissRetriever
) -> None:
    @sgl.function
    def ask(s: Any, order: Any = "score") -> None:
        s += "Read.\n\n"
        s += rag_retrieve(retriever, QUESTION, name="public", order=order, public=True)
        s += "And of mine:\n\n"
        s += rag_retrieve(retriever, "What is a lambda?", order=order)
        s += sgl.gen("answer", max_tokens=2, temperature=0)

    def tenant(salt: str) -> RagEndpoint:
        return RagEndpoint(server.url, chat_template_name="chatml", strict=True, cache_salt=salt)

    first, found = ask.run(backend=tenant("one")), {}
    for salt in ("one", "two"):
        again = ask.run(order="cached_first", backend=tenant(salt))
        assert again.error() is None
        assert again["public"] == first["public"]
        found[salt] = cached_tokens(again)
    prompt_tokens = first.get_meta_info("answer")["prompt_tokens"]
    assert cached_tokens(first) == 0
    assert 0 < found["two"] < found["one"] == prompt_tokens - 1
    rows = server.get("/rag/documents")["documents"]
    owners = {
        name: {row["namespace"] for row in rows if row["id"] == name}
        for name in first["public"].ids
    }
    assert all(owner == {""} for owner in owners.values())
    # The tenant's own documents in the order in which it has them, which nobody else learns of.
    text, mine = first.text()[: first.text().index("And of mine")], first["docs"].documents
    reversed_ = [first["docs"][each.start : each.end] for each in mine[::-1]]
    assert tenant("one").cached_order(text + "And of mine:\n\n", reversed_) == [1, 0]
    assert tenant("two").cached_order(text + "And of mine:\n\n", reversed_) == [1, 0]
    assert tenant("three").cached_order(text + "And of mine:\n\n", reversed_) == [0, 1]


def test_chats_of_tenants_share_public_documents(server: Server, retriever: FaissRetriever) -> None:
    (*_, final) = retriever.retrieve(QUESTION, 2)
    documents = [scored.document for scored in final.documents]
    text = "\n\n".join(document.text for document in documents)
    messages = [{"role": "user", "content": text}]
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")

    for salt in ("one", "two"):
        extra = annotate(messages, documents, strict=True, cache_salt=salt, salt_from=1)
        client.chat.completions.create(
            model="default", messages=messages, max_tokens=2, extra_body=extra
        )
    rows = server.get("/rag/documents")["documents"]
    public, private = (document.id for document in documents)
    assert {(row["id"], row["namespace"]) for row in rows} == {
        (public, ""),
        (private, namespace_name(None, "one")),
        (private, namespace_name(None, "two")),
    }
    assert server.get("/rag/stats")["requests"]["device_hit_tokens"]


def test_the_order_of_malformed_documents_is_refused(server: Server, backend: RagEndpoint) -> None:
    assert backend.cached_order("Read.", ["a document", "another"]) == [0, 1]
    with pytest.raises(RequestError, match="none of them empty"):
        backend.cached_order("Read.", ["a document", ""])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_chat_is_answered_while_its_documents_are_searched(
    server: Server, retriever: FaissRetriever, stream: bool, reverse: bool
) -> None:
    """With `openai`'s client; the guess is right or, with the documents reversed, wrong."""

    def messages(documents: Any) -> list[dict[str, str]]:
        text = "\n\n".join(document.text for document in documents)
        return [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]

    def started() -> int:
        count: int = server.get("/rag/stats")["speculation"]["started"]
        return count

    async def ask(speculative: bool) -> tuple[str, RetrievalReport]:
        before = started()
        staged = Twice(retriever, reverse=reverse)
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            task = asyncio.create_task(
                retrieve_and_generate(
                    client,
                    staged,
                    QUESTION,
                    messages,
                    speculative=speculative,
                    strict=True,
                    model="default",
                    max_tokens=8,
                    temperature=0,
                    stream=stream,
                )
            )
            if speculative:  # The server must know of the guess to keep it.
                await asyncio.to_thread(until, lambda: started() > before)
            staged.go_on.set()
            answer = await task
            if not stream:
                return answer.completion.choices[0].message.content, answer.retrieval
            pieces = [chunk.choices[0].delta.content async for chunk in answer.completion]
            return "".join(piece or "" for piece in pieces), answer.retrieval

    plain, _ = asyncio.run(ask(speculative=False))
    text, retrieval = asyncio.run(ask(speculative=True))
    assert plain
    assert text == plain
    assert (retrieval.kept, retrieval.cancelled) == ((0, 1) if reverse else (1, 0))
