"""Speculation sees how a program goes on, and changes nothing of what it asks and gets."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import RagEndpoint, rag_retrieve
from unit.frontend.speculative_programs import GUESS, OTHER, SPECULATING, report_of, sent, settled
from unit.frontend.speculative_server import (
    WAIT_S,
    Request,
    Scripted,
    SpeculativeServer,
    eventually,
)

pytestmark = SPECULATING


def in_a_sum(s: Any, retrieve: Any) -> None:
    s += "a" + retrieve() + "b" + sgl.gen("answer") + "c"
    s += "d" + sgl.gen("more")


def in_roles(s: Any, retrieve: Any) -> None:
    s += sgl.user("Look: " + retrieve() + "Who?")
    s += sgl.assistant("It is " + sgl.gen("answer"))


def in_role_blocks(s: Any, retrieve: Any) -> None:
    with s.user():
        s += retrieve()
        s += "Who?"
    with s.assistant():
        s += sgl.gen("answer", stop="x")


def after_other_messages(s: Any, retrieve: Any) -> None:
    s += sgl.system("Be brief.")
    s += sgl.user("Hello") + sgl.assistant(sgl.gen("hello"))
    s += sgl.user(retrieve())
    s += sgl.assistant(sgl.gen("answer", stop=["x", "y"]))


def in_a_scope(s: Any, retrieve: Any) -> None:
    with s.var_scope("whole"):
        s += "a" + retrieve()
        with s.var_scope("inner"):
            s += "b"
    s += sgl.gen("answer")


def in_nested_lists(s: Any, retrieve: Any) -> None:
    s += sgl.user("x" + (retrieve() + ("y" + sgl.gen("answer"))))


def with_options(s: Any, retrieve: Any) -> None:
    s += retrieve() + sgl.gen("answer", regex="[0-9]+", max_tokens=3, top_p=0.5, stop=["\n"])


def of_a_type(s: Any, retrieve: Any) -> None:
    s += retrieve() + sgl.gen("answer", dtype=int)


def with_logprobs(s: Any, retrieve: Any) -> None:
    s += retrieve() + sgl.gen("answer", return_logprob=True, top_logprobs_num=2)


def with_a_choice(s: Any, retrieve: Any) -> None:
    s += retrieve() + "They are " + sgl.select("answer", ["pets", "stars"]) + sgl.gen("more")


def with_an_unconditional_choice(s: Any, retrieve: Any) -> None:
    s += retrieve() + sgl.select(
        "answer", ["pets", "stars"], choices_method=sgl.unconditional_likelihood_normalized
    )


PROGRAMS = [
    in_a_sum,
    in_roles,
    in_role_blocks,
    after_other_messages,
    in_a_scope,
    in_nested_lists,
    with_options,
    of_a_type,
    with_logprobs,
    with_a_choice,
    with_an_unconditional_choice,
]


def asked(requests: list[Request]) -> list[dict[str, Any]]:
    """Requests without what tells speculations from others."""
    return [
        {
            **{k: v for k, v in r.body.items() if k not in ("rid", "sampling_params")},
            "sampling_params": _plain(r.body["sampling_params"]),
        }
        for r in requests
    ]


def _plain(params: Any) -> Any:
    if isinstance(params, list):
        return [_plain(one) for one in params]
    rag = dict(params.get("custom_params", {}).get("rag", {}))
    rag.pop("speculative", None)
    plain = {k: v for k, v in params.items() if k != "custom_params"}
    return plain | ({"rag": rag} if rag.get("documents") else {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_with_and_without_speculation_the_same_is_asked_and_answered(
    server: SpeculativeServer, backend: RagEndpoint, program: Any, stream: bool
) -> None:
    function = sgl.function(program)

    def run(speculative: bool) -> tuple[Any, list[dict[str, Any]]]:
        server.requests.clear()
        arrived = sent(server) if speculative else lambda: None

        def retrieve() -> Any:
            # What follows must be there when the search ends, as it is with any real search.
            script = Scripted(GUESS, arrived, GUESS)
            return rag_retrieve(script, "q", speculative=speculative)

        state = function.run(retrieve=retrieve, backend=backend, temperature=0, stream=stream)
        # With `stream` the program itself has a thread, which may not have begun.
        text = "".join(state.text_iter())
        variables = {k: v for k, v in state.stream_executor.variables.items() if k != "retrieve"}
        return (text, variables, state.messages()), asked(server.requests)

    plain, speculative = run(False), run(True)
    assert server.speculations
    assert speculative == plain
    assert backend.retrievals().kept == 1
    assert backend.retrievals().cancelled == 0


@pytest.mark.parametrize(
    "between",
    [
        lambda s: s.__iadd__(rag_retrieve(Scripted(OTHER), "q", name="more")),
        lambda s: s["docs"],
        lambda s: s.fork(2),
        lambda s: s.__iadd__(sgl.gen("two", n=2)),
        lambda s: s.__iadd__(sgl.image(b"a picture")),
    ],
    ids=["retrieval", "value read", "fork", "two samples", "image"],
)
def test_nothing_is_sent_ahead_beyond_what_only_the_program_can_do(
    server: SpeculativeServer, backend: RagEndpoint, between: Any
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, lambda: time.sleep(0.05), GUESS), "q")
        between(s)
        s += sgl.gen("answer")

    program.run(backend=backend).sync()
    assert server.speculations == []
    assert backend.retrievals().started == 0


def test_a_program_that_has_not_come_to_its_request_yet_is_tried_again_when_it_has(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    searching = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, searching.set, sent(server), GUESS), "q")
        assert searching.wait(WAIT_S)
        s += "Who? "
        s += sgl.gen("answer")

    state = program.run(backend=backend)
    assert state["answer"] == "[29:'o? ']"
    assert len(server.requests) == 1
    report_of(state, kept=1)


def test_a_race_of_appending_and_searching_never_changes_the_answer(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    @sgl.function
    def program(s: Any, delay_s: float) -> None:
        script = [step for i in range(6) for step in (OTHER if i % 2 else GUESS, pause)]
        s += rag_retrieve(Scripted(*script, GUESS), "q")
        time.sleep(delay_s)
        s += "Who? "
        time.sleep(delay_s)
        s += sgl.gen("answer")

    def pause() -> None:
        time.sleep(0.001)

    for i in range(60):
        state = program.run(delay_s=i % 10 * 0.0003, backend=backend)
        assert state["answer"] == "[29:'o? ']"
    eventually(lambda: settled(backend.retrievals()))
