"""When a speculation becomes the answer, and that nothing of it is handed out before."""

from __future__ import annotations

import time
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import RagEndpoint, rag_retrieve
from sglang.lang.global_config import global_config
from unit.frontend.speculative_programs import GUESS, SPECULATING, ask, report_of, sent
from unit.frontend.speculative_server import Scripted, SpeculativeServer, eventually

pytestmark = SPECULATING


def test_tokens_are_handed_out_only_when_the_server_has_made_it_an_ordinary_request(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: True
    server.hold_after = 4
    server.promoting.clear()
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend, stream=True)
    eventually(lambda: server.promotions)
    time.sleep(0.05)
    assert state.stream_executor.variables.get("answer", "") == ""
    server.promoting.set()
    eventually(lambda: state.stream_executor.variables.get("answer") == "[35:")
    server.requests[0].go.set()
    assert "".join(state.text_iter("answer")) == "[35:'o? ']"


def test_a_complete_answer_needs_no_reply(server: SpeculativeServer, backend: RagEndpoint) -> None:
    server.promoting.clear()
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    assert len(server.requests) == 1
    server.promoting.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_speculation_that_the_server_has_ended_is_asked_again(
    server: SpeculativeServer, backend: RagEndpoint, stream: bool
) -> None:
    server.hold = lambda request: request.speculative
    server.promoting.clear()
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend, stream=stream)
    eventually(lambda: server.promotions)
    server.requests[0].stop("speculation ended: others wait")
    server.promoting.set()
    assert "".join(state.text_iter("answer")) == "[35:'o? ']"
    assert [r.speculative for r in server.requests] == [True, False]
    report = report_of(state, ended=1, kept=0)
    assert report.search_not_overlapped_s == report.search_s


@pytest.mark.parametrize("stream", [False, True])
def test_a_speculation_that_the_server_does_not_know_is_dropped(
    server: SpeculativeServer, backend: RagEndpoint, stream: bool
) -> None:
    server.hold = lambda request: request.speculative
    server.promote = lambda request: "unknown"
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend, stream=stream)
    assert "".join(state.text_iter("answer")) == "[35:'o? ']"
    report_of(state, cancelled=1, kept=0)
    eventually(lambda: server.requests[0].end == "Aborted")


def test_a_speculation_still_on_its_way_is_asked_for_again(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: True
    server.promote = lambda request: "running" if len(server.promotions) > 2 else "unknown"
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend)
    eventually(lambda: len(server.promotions) == 3)
    server.requests[0].go.set()
    assert state["answer"] == "[35:'o? ']"
    assert len(server.requests) == 1


def test_a_server_that_cannot_promote_gets_the_request_again(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: request.speculative
    server.missing = ("/rag/promote",)
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    report_of(state, cancelled=1)


def test_a_choice_promoted_half_way_goes_on_as_an_ordinary_request(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    server.hold = lambda request: True
    retriever = Scripted(GUESS, sent(server), GUESS)

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(retriever, "q") + sgl.select("kind", ["pets", "stars"])

    state = program.run(backend=backend)
    eventually(lambda: server.promotions)
    server.hold = lambda request: False
    server.requests[0].go.set()
    assert state["kind"] in ("pets", "stars")
    assert [r.speculative for r in server.requests] == [True, False]
    assert server.promotions == [server.requests[0].rids]
    report_of(state, kept=1)


def test_every_request_of_a_choice_is_marked_as_speculative(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    method = sgl.unconditional_likelihood_normalized

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(Scripted(GUESS, sent(server, 3), GUESS), "q")
        s += sgl.select("kind", ["pets", "stars"], choices_method=method)

    assert program.run(backend=backend)["kind"]
    assert [r.speculative for r in server.requests] == [True] * 3
    eventually(lambda: server.promotions)
    assert server.promotions == [[rid for r in server.requests for rid in r.rids]]


def test_another_question_than_the_one_asked_ahead_is_asked_anew(
    server: SpeculativeServer, backend: RagEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_config, "skip_special_tokens_in_output", True)

    def change() -> None:
        sent(server)()
        monkeypatch.setattr(global_config, "skip_special_tokens_in_output", False)

    state = ask(Scripted(GUESS, change, GUESS)).run(backend=backend)
    assert state["answer"] == "[35:'o? ']"
    assert [r.body["sampling_params"]["skip_special_tokens"] for r in server.requests] == [
        True,
        False,
    ]
    report_of(state, cancelled=1, kept=0)


def test_a_template_that_gives_another_text_each_time_is_never_wrong(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    count = iter(range(100))
    state = ask(
        Scripted(GUESS, sent(server), GUESS), template=lambda d: f"{next(count)}{d.text}"
    ).run(backend=backend)
    assert state["docs"] == "2Cats purr.3Dogs bark."
    assert state["answer"]
    assert server.ordinary[0].prompt == "Read. 2Cats purr.3Dogs bark.Who? "
    report_of(state, cancelled=1)


def test_more_are_promoted_than_the_server_takes_at_once(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    rids = [str(number) for number in range(2500)]
    assert list(backend._promote(rids)) == rids
    assert [len(asked) for asked in server.promotions] == [1024, 1024, 452]
