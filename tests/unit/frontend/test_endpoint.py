from __future__ import annotations

import threading
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import RagEndpoint, Retries, rag_retrieve
from rag_radix_frontend.errors import ArgumentError, RequestAborted, RequestError

pytestmark = pytest.mark.filterwarnings("ignore:Error in stream_executor")


@pytest.fixture
def backend(stub: Any) -> RagEndpoint:
    return RagEndpoint(stub.url, chat_template_name="chatml")


@sgl.function
def answer(s: Any) -> None:
    s += "Question? " + sgl.gen("answer")


def test_every_request_has_a_unique_id_of_one_length(backend: RagEndpoint, stub: Any) -> None:
    answer.run_batch([{}] * 20, backend=backend)
    rids = [body["rid"] for body in stub.asked]
    assert len(set(rids)) == 20
    assert {len(rid) for rid in rids} == {32}


def test_a_batch_within_a_select_has_an_id_for_each_text(backend: RagEndpoint, stub: Any) -> None:
    @sgl.function
    def choose(s: Any) -> None:
        s += "Either " + sgl.select("kind", ["a", "b", "c"])

    choose.run(backend=backend).sync()
    assert len(set(stub.asked[1]["rid"])) == 3


def test_a_request_without_documents_is_the_same_as_stock_but_for_its_id(
    backend: RagEndpoint, stub: Any
) -> None:
    stock = sgl.RuntimeEndpoint(stub.url, chat_template_name="chatml")
    for one in (backend, stock):
        for stream in (False, True):
            assert answer.run(
                backend=one, stream=stream, temperature=0, return_logprob=True, top_logprobs_num=2
            )["answer"]
    ours, stocks = stub.asked[:2], stub.asked[2:]
    assert [{k: v for k, v in body.items() if k != "rid"} for body in ours] == stocks


def test_several_samples_are_a_list(backend: RagEndpoint) -> None:
    state = answer.run(n=3, backend=backend)
    assert state["answer"] == ["[10]"] * 3
    assert state.text() == "Question? [10]"
    assert len(state.get_meta_info("answer")) == 3


def test_several_samples_cannot_be_streamed(backend: RagEndpoint) -> None:
    state = answer.run(n=3, backend=backend, stream=True)
    with pytest.raises(ArgumentError, match="n must be 1, not 3"):
        list(state.text_iter("answer"))


def test_strict_travels_with_the_documents(stub: Any, listed: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals") + sgl.gen("answer")

    backend = RagEndpoint(stub.url, chat_template_name="chatml", strict=True)
    program.run(backend=backend).sync()
    assert stub.asked[0]["sampling_params"]["custom_params"]["rag"]["strict"] is True


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_aborts_the_running_request_and_ends_the_program(
    backend: RagEndpoint, stub: Any, stream: bool
) -> None:
    stub.hold = True
    state = answer.run(backend=backend, stream=stream)
    assert stub.arrived.wait(30)
    backend.cancel(state)
    assert set(stub.aborted) == {stub.asked[0]["rid"]}
    with pytest.raises(RequestAborted, match="Aborted"):
        state["answer"]


def test_a_cancelled_program_sends_nothing_more(
    backend: RagEndpoint, stub: Any, listed: Any
) -> None:
    gate = threading.Event()

    class Slow:
        def retrieve(self, query: str, k: int) -> Any:
            gate.wait()
            return listed.retrieve(query, k)

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Slow(), "animals") + sgl.gen("answer")

    state = program.run(backend=backend)
    backend.cancel(state)
    gate.set()
    with pytest.raises(RequestAborted, match="cancelled"):
        state["answer"]
    assert stub.asked == []


def test_cancelling_one_program_leaves_others_alone(backend: RagEndpoint, stub: Any) -> None:
    finished = answer.run(backend=backend)
    finished.sync()
    backend.cancel(finished)
    assert stub.aborted == []
    assert answer.run(backend=backend)["answer"] == "[10]"


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ('data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n', "too long"),
        ("", "closed the stream"),
        ('data: {"text": "half", "meta_info": {"finish_reason": null}}\n\n', "closed the stream"),
    ],
)
def test_a_broken_stream_is_raised(stub: Any, event: str, message: str) -> None:
    backend = RagEndpoint(stub.url, chat_template_name="chatml", retries=Retries(attempts=1))

    class Body:
        def iter_lines(self) -> list[bytes]:
            return event.encode().split(b"\n")

        def close(self) -> None:
            pass

    backend._sender._reply = lambda state, data: Body()  # type: ignore[method-assign]
    state = answer.run(backend=backend, stream=True)
    with pytest.raises(RequestError, match=message):
        list(state.text_iter())


def test_a_guess_that_was_aborted_is_none_to_promote(backend: RagEndpoint, stub: Any) -> None:
    aborted = {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}
    stub.reply = lambda body: (200, aborted)

    class State:
        text_ = "Question?"

    state, copy = State(), State()
    backend._in_flight.speculate(state, copy)
    with pytest.raises(RequestAborted):
        backend._sender.once(copy, {"text": copy.text_, "sampling_params": {}})
    assert backend._in_flight.make_ordinary(copy) == []


def test_a_server_without_the_api_is_reported(stub: Any) -> None:
    with pytest.raises(RequestError, match="no route"):
        RagEndpoint(stub.url + "/elsewhere", chat_template_name="chatml")
