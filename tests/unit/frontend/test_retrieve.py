"""Programs with `rag_retrieve()`, run by SGLang's own interpreter against an HTTP server."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import FaissRetriever, RagEndpoint, RetrievedText, Stage, rag_retrieve
from rag_radix_frontend.errors import ArgumentError
from rag_radix_frontend.retrieve import UnannotatedWarning
from unit.frontend.speculative_server import SpeculativeServer, eventually

CATS_TEXT, DOGS_TEXT = "Cats purr.\n\n", "Dogs bark.\n\n"
BOTH = {"animals/cats": CATS_TEXT, "animals/dogs": DOGS_TEXT}
MOON = {"space/moon": "The moon is round.\n\n"}


@pytest.fixture
def backend(stub: Any) -> RagEndpoint:
    return RagEndpoint(stub.url, chat_template_name="chatml")


def documents_of(body: dict[str, Any], text: str | None = None) -> dict[str, str]:
    """The documents of a recorded request: id to the text its range covers."""
    rag = body["sampling_params"]["custom_params"]["rag"]
    assert rag["unit"] == "char"
    text = body["text"] if text is None else text
    return {d["id"]: text[d["start"] : d["end"]] for d in rag["documents"]}


def run(program: Any, backend: Any, **arguments: Any) -> Any:
    state = sgl.function(program).run(backend=backend, **arguments)
    state.sync()
    assert state.error() is None
    return state


def test_on_its_own(backend: RagEndpoint, stub: Any, listed: Any) -> None:
    def program(s: Any) -> None:
        s += "Read this.\n"
        s += rag_retrieve(listed, "animals")
        s += "Who purrs? "
        s += sgl.gen("answer", max_tokens=4)

    state = run(program, backend)
    assert state.text() == f"Read this.\n{CATS_TEXT}{DOGS_TEXT}Who purrs? {state['answer']}"
    (body,) = stub.asked
    assert documents_of(body) == BOTH
    assert body["sampling_params"]["max_new_tokens"] == 4
    assert [
        d.get("version") for d in body["sampling_params"]["custom_params"]["rag"]["documents"]
    ] == ["3", None]


def test_the_variable_is_text_with_ids_scores_and_texts(backend: RagEndpoint, listed: Any) -> None:
    def program(s: Any) -> None:
        s += "a"
        s += rag_retrieve(listed, "animals", k=2, name="found", template="<{text}>")

    found = run(program, backend)["found"]
    assert found == "<Cats purr.><Dogs bark.>"
    assert found.ids == ["animals/cats", "animals/dogs"]
    assert found.scores == [1.0, 0.9]
    assert found.texts == ["Cats purr.", "Dogs bark."]


def test_within_a_role(backend: RagEndpoint, stub: Any, listed: Any) -> None:
    def program(s: Any) -> None:
        s += sgl.system("Be brief.")
        s += sgl.user(rag_retrieve(listed, "animals"))
        s += sgl.assistant(sgl.gen("answer"))

    state = run(program, backend)
    assert documents_of(stub.asked[0]) == BOTH
    assert stub.asked[0]["text"].startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert state.messages()[1] == {"role": "user", "content": CATS_TEXT + DOGS_TEXT}


def test_within_a_role_block(backend: RagEndpoint, stub: Any, listed: Any) -> None:
    def program(s: Any) -> None:
        with s.user():
            s += "Look: "
            s += rag_retrieve(listed, "animals")
        with s.assistant():
            s += sgl.gen("answer")

    run(program, backend)
    assert documents_of(stub.asked[0]) == BOTH


def test_in_a_sum_of_expressions(backend: RagEndpoint, stub: Any, listed: Any) -> None:
    def program(s: Any) -> None:
        s += "a" + rag_retrieve(listed, "animals", k=1) + "b" + sgl.gen("answer") + "c"

    run(program, backend)
    assert stub.asked[0]["text"] == f"a{CATS_TEXT}b"
    assert documents_of(stub.asked[0]) == {"animals/cats": CATS_TEXT}


def test_several_retrievals_and_the_requests_between_them(
    backend: RagEndpoint, stub: Any, listed: Any
) -> None:
    def program(s: Any) -> None:
        s += sgl.gen("none")
        s += rag_retrieve(listed, "animals", name="first") + sgl.gen("hop")
        s += rag_retrieve(listed, "space", name="second") + sgl.gen("answer")

    state = run(program, backend)
    before, between, after = stub.asked
    assert "custom_params" not in before["sampling_params"]
    assert documents_of(between) == BOTH
    assert documents_of(after) == BOTH | MOON
    assert (state["first"].ids, state["second"].ids) == (list(BOTH), list(MOON))


def test_a_query_may_come_from_the_model(backend: RagEndpoint, stub: Any, listed: Any) -> None:
    stub.reply = lambda body: (200, {"text": "space", "meta_info": {}})

    def program(s: Any) -> None:
        s += sgl.gen("query")
        s += rag_retrieve(listed, s["query"]) + sgl.gen("answer")

    run(program, backend)
    assert documents_of(stub.asked[1]) == MOON


def test_forks_have_the_documents_and_add_their_own(
    backend: RagEndpoint, stub: Any, listed: Any
) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals")
        forks = s.fork(2)
        forks[0] += "x" + sgl.gen("answer")
        forks[1] += rag_retrieve(listed, "space", name="more") + sgl.gen("answer")
        forks.join()
        s += sgl.gen("end")

    run(program, backend)
    by_text = {body["text"]: body for body in stub.asked if body["sampling_params"].get("n")}
    shared = CATS_TEXT + DOGS_TEXT
    assert documents_of(by_text[shared + "x"]) == BOTH
    assert documents_of(by_text[shared + MOON["space/moon"]]) == BOTH | MOON
    assert documents_of(by_text[shared]) == BOTH
    commit = next(body for body in stub.asked if body["sampling_params"].get("n") is None)
    assert documents_of(commit) == BOTH


def test_a_fork_before_any_text_retrieves(backend: RagEndpoint, stub: Any, listed: Any) -> None:
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: rag_retrieve(listed, ["animals", "space"][i]) + sgl.gen("answer")
        forks.join()

    state = run(program, backend)
    assert sorted(map(documents_of, stub.asked), key=len) == [MOON, BOTH]
    assert len(state["answer"]) == 2


def test_texts_of_forks_bring_their_documents_when_they_are_joined(
    backend: RagEndpoint, stub: Any, listed: Any
) -> None:
    def program(s: Any) -> None:
        s += "Start. "
        forks = s.fork(2)
        forks += lambda i: f"{i}: " + rag_retrieve(listed, ["animals", "space"][i])
        forks.join("concate_and_append")
        s += sgl.gen("answer")

    run(program, backend)
    assert documents_of(stub.asked[-1]) == BOTH | MOON


def test_retrieved_text_keeps_its_documents_in_another_state(
    backend: RagEndpoint, stub: Any, listed: Any
) -> None:
    def first(s: Any) -> None:
        s += "long before" + rag_retrieve(listed, "animals")

    found = run(first, backend)["docs"]

    def second(s: Any, found: RetrievedText) -> None:
        s += "x"
        s += found
        s += sgl.gen("answer")

    run(second, backend, found=found)
    assert documents_of(stub.asked[-1]) == BOTH


def test_a_batch_of_programs_shares_a_retriever(
    backend: RagEndpoint, stub: Any, minilm_retriever: FaissRetriever
) -> None:
    @sgl.function
    def program(s: Any, question: str) -> None:
        s += sgl.user(rag_retrieve(minilm_retriever, question, k=3) + question)
        s += sgl.assistant(sgl.gen("answer"))

    questions = ["loops", "exceptions", "numbers", "strings"] * 3
    states = program.run_batch([{"question": q} for q in questions], backend=backend)
    assert [len(s["docs"].ids) for s in states] == [3] * 12
    assert len(stub.asked) == 12
    sent = {body["text"]: documents_of(body) for body in stub.asked}
    for state in states:
        docs = state["docs"]
        prompt = next(text for text in sent if state.text().startswith(text))
        assert list(sent[prompt]) == docs.ids
        assert list(sent[prompt].values()) == [text + "\n\n" for text in docs.texts]


def test_streaming_programs_send_documents_and_stream_them(
    backend: RagEndpoint, stub: Any, listed: Any
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + rag_retrieve(listed, "animals") + sgl.gen("answer")

    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter()) == f"a{CATS_TEXT}{DOGS_TEXT}[25]"
    assert documents_of(stub.asked[0]) == BOTH
    assert stub.asked[0]["stream"] is True
    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter("docs")) == CATS_TEXT + DOGS_TEXT
    assert "".join(state.text_iter("answer")) == "[25]"


def test_select_sends_documents_with_every_choice(
    backend: RagEndpoint, stub: Any, listed: Any
) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals") + "They are " + sgl.select("kind", ["pets", "stars"])

    state = run(program, backend)
    assert state["kind"] in ("pets", "stars")
    prefix, choices = stub.asked
    assert documents_of(prefix) == BOTH
    for text, params in zip(choices["text"], choices["sampling_params"], strict=True):
        assert documents_of({"text": text, "sampling_params": params}) == BOTH


def counted(bodies: Iterable[dict[str, Any]]) -> list[bool]:
    """Of each of some recorded requests, whether it counts as a retrieval of its own."""
    found: list[bool] = []
    for body in bodies:
        params = body["sampling_params"]
        for each in params if isinstance(params, list) else [params]:
            found.append(each.get("custom_params", {}).get("rag", {}).get("counts", True))
    return found


@pytest.mark.parametrize(
    "method", [sgl.token_length_normalized, sgl.unconditional_likelihood_normalized]
)
def test_a_select_counts_once(server: SpeculativeServer, listed: Any, method: Any) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals", speculative=False)
        s += sgl.select("kind", ["pets", "stars"], choices_method=method)
        s += sgl.gen("answer")

    run(program, RagEndpoint(server.url))
    first, *choices, last = counted(request.body for request in server.requests)
    assert (first, set(choices), last) == (True, {False}, True)


def test_what_forks_begin_with_counts_once(backend: RagEndpoint, stub: Any, listed: Any) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals")
        forks = s.fork(2)
        forks += lambda i: f"{i}: " + sgl.gen("answer")
        forks[0] += sgl.gen("more")
        forks.join()

    run(program, backend)
    assert [documents_of(body) for body in stub.asked] == [BOTH] * 4
    # The request for the text that they share, their first ones, and one that follows.
    shared, *others = counted(stub.asked)
    assert (shared, sorted(others)) == (True, [False, False, True])


@pytest.mark.parametrize("stream", [False, True])
def test_a_fork_that_retrieves_counts(
    backend: RagEndpoint, stub: Any, listed: Any, stream: bool
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals")
        forks = s.fork(2)
        forks += rag_retrieve(listed, "space", name="more") + sgl.gen("answer")
        forks.join()

    state = program.run(backend=backend, stream=stream)
    eventually(lambda: len(stub.asked) == 3)
    assert state.error() is None
    assert counted(stub.asked) == [True, True, True]


def test_without_a_thread(backend: RagEndpoint, stub: Any, listed: Any) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals") + sgl.gen("answer")

    run(program, backend, use_thread=False)
    assert documents_of(stub.asked[0]) == BOTH


def test_programs_with_retrieval_can_be_traced(backend: RagEndpoint, listed: Any) -> None:
    @sgl.function
    def program(s: Any, question: str) -> None:
        s += "Fixed start. "
        s += rag_retrieve(listed, question)
        s += s["docs"]
        s += sgl.gen("answer")

    nodes = program.trace(backend=backend).flatten_nodes()
    assert [type(node).__name__ for node in nodes[:2]] == ["SglConstantText", "SglRetrieve"]


def test_a_stock_endpoint_runs_the_program_and_warns(stub: Any, listed: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals") + sgl.gen("answer")

    stock = sgl.RuntimeEndpoint(stub.url, chat_template_name="chatml")
    with pytest.warns(UnannotatedWarning, match="RuntimeEndpoint doesn't tell"):
        assert program.run(backend=stock)["answer"] == "[24]"
    assert stub.asked[0]["text"] == CATS_TEXT + DOGS_TEXT
    assert "custom_params" not in stub.asked[0]["sampling_params"]


def test_the_warning_appears_once_for_many_programs(stub: Any, listed: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals")

    stock = sgl.RuntimeEndpoint(stub.url, chat_template_name="chatml")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            program.run(backend=stock).sync()
    assert [w.category for w in caught] == [UnannotatedWarning]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"retriever": object()}, "is no retriever"),
        ({"query": 7}, "query must be text, not 7"),
        ({"query": None}, "query must be text, not None"),
        ({"k": 0}, "k must be .* not 0"),
        ({"k": 1.5}, "k must be .* not 1.5"),
        ({"name": ""}, "name must not be empty"),
        ({"template": "{rank}"}, "'rank'"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(
    listed: Any, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        rag_retrieve(**{"retriever": listed, "query": "animals", **arguments})


class DogsFirst:
    """The documents on animals, dogs first."""

    def __init__(self, listed: Any) -> None:
        self._listed = listed

    def retrieve(self, query: str, k: int) -> Any:
        for documents, final in self._listed.retrieve(query, k):
            yield Stage(documents[::-1], final)


def test_canonical_order_doesnt_depend_on_scores(backend: RagEndpoint, listed: Any) -> None:
    def program(s: Any, order: str) -> None:
        s += rag_retrieve(DogsFirst(listed), "animals", order=order)

    assert run(program, backend, order="score")["docs"] == DOGS_TEXT + CATS_TEXT
    state = run(program, backend, order="canonical")
    assert state["docs"] == CATS_TEXT + DOGS_TEXT
    assert state["docs"].ids == list(BOTH)


@pytest.mark.parametrize("speculative", [True, False])
def test_cached_first_order_is_the_servers(
    backend: RagEndpoint, listed: Any, monkeypatch: pytest.MonkeyPatch, speculative: bool
) -> None:
    asked = []

    def cached_order(text: str, documents: list[str], public: bool) -> list[int]:
        asked.append((text, documents))
        return [documents.index(DOGS_TEXT), documents.index(CATS_TEXT)]

    monkeypatch.setattr(backend, "cached_order", cached_order)

    def program(s: Any) -> None:
        s += "Read this.\n"
        s += rag_retrieve(listed, "animals", order="cached_first", speculative=speculative)

    assert run(program, backend)["docs"].ids == ["animals/dogs", "animals/cats"]
    # Once for the stages with the same documents, in the order of the first that is of use.
    first = [DOGS_TEXT, CATS_TEXT] if speculative else [CATS_TEXT, DOGS_TEXT]
    assert asked == [("Read this.\n", first)]


def test_other_backends_have_no_cache_to_ask(stub: Any, listed: Any) -> None:
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals", order="cached_first")

    stock = sgl.RuntimeEndpoint(stub.url)
    with pytest.warns(UserWarning, match="cached_first"):
        failure = sgl.function(program).run(backend=stock).error()
    assert isinstance(failure, ArgumentError)


def test_an_unknown_order_is_refused(listed: Any) -> None:
    with pytest.raises(ArgumentError, match="unknown order 'best'"):
        rag_retrieve(listed, "animals", order="best")  # type: ignore[arg-type]
