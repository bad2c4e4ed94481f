"""Requests that break off are asked again, and have one answer all the same."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from http.client import IncompleteRead, InvalidURL, RemoteDisconnected
from typing import Any

import pytest
import sglang as sgl
from breaking_proxy import BreakingProxy
from rag_radix_frontend import RagEndpoint, Retries, rag_retrieve, retries
from rag_radix_frontend.errors import ArgumentError, ConnectionLost, RequestAborted, RequestError
from unit.frontend.speculative_programs import GUESS, SPECULATING, ask, report_of, sent
from unit.frontend.speculative_server import Scripted, SpeculativeServer, eventually
from unit.frontend.test_connections import OK, Server
from unit.frontend.token_server import TokenServer

pytestmark = SPECULATING

QUICK = Retries(attempts=4, first_pause_s=0.001, longest_pause_s=0.002)
GOING_ON = Retries(attempts=4, first_pause_s=0.001, longest_pause_s=0.002, continues=True)
SCRIPT = "A fox’s 🦊 tail.\nIt is long.\n\nNo more."


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    server = TokenServer(SCRIPT)
    yield server
    server.close()


@pytest.fixture
def proxy(tokens: TokenServer) -> Iterator[BreakingProxy]:
    proxy = BreakingProxy(tokens.url)
    yield proxy
    proxy.close()


@pytest.fixture(params=["end", "reset"])
def breaking(request: pytest.FixtureRequest, proxy: BreakingProxy) -> BreakingProxy:
    proxy.resets = request.param == "reset"
    return proxy


def endpoint(url: str, retries: Retries = QUICK) -> RagEndpoint:
    return RagEndpoint(url, chat_template_name="chatml", retries=retries)


def answer(backend: RagEndpoint, *, stream: bool = False, **params: Any) -> tuple[str, Any]:
    """A program's answer, and what the server said of it."""

    @sgl.function
    def program(s: Any) -> None:
        s += "Tell me: " + sgl.gen("answer", **{"max_tokens": 100, "temperature": 0, **params})

    state = program.run(backend=backend, stream=stream)
    shown = "".join(state.text_iter("answer")) if stream else state["answer"]
    assert shown == state["answer"]
    return shown, state.get_meta_info("answer")


def reply_bytes(tokens: TokenServer) -> int:
    """Bytes of a whole streamed answer."""
    with socket.create_connection(("127.0.0.1", tokens.port)) as client:
        body = b'{"text":"Tell me: ","sampling_params":{"max_new_tokens":100},"stream":true}'
        head = b"POST /generate HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        client.sendall(head % len(body) + body)
        return len(b"".join(iter(lambda: client.recv(65_536), b"")))


@pytest.mark.parametrize("cut", [0, 1, 20, 140])
def test_an_answer_that_breaks_off_is_asked_for_again(
    tokens: TokenServer, breaking: BreakingProxy, cut: int
) -> None:
    backend = endpoint(breaking.url)
    breaking.cuts = [cut, cut]
    assert answer(backend)[0] == SCRIPT
    rids = [body["rid"] for body in tokens.generating]
    assert len(set(rids)) == 3
    eventually(lambda: set(tokens.aborted) == set(rids[:2]))


@pytest.mark.parametrize("cut", [0, 30, 120])
def test_a_stream_begins_again_before_its_first_piece(
    tokens: TokenServer, breaking: BreakingProxy, cut: int
) -> None:
    backend = endpoint(breaking.url)
    breaking.cuts = [cut]
    assert answer(backend, stream=True)[0] == SCRIPT
    assert all("text" in body for body in tokens.generating)


def test_a_stream_that_breaks_off_later_is_an_error_unless_it_may_go_on(
    tokens: TokenServer, proxy: BreakingProxy
) -> None:
    backend = endpoint(proxy.url)
    proxy.cuts = [2000]
    with pytest.raises(
        ConnectionLost, match=r"/generate broke off after \d+ characters .*continues=True"
    ):
        answer(backend, stream=True)
    assert len(tokens.generating) == 1


@pytest.mark.parametrize("stop", [None, "\n\n", ["zebra", "\n\n", "long.\n\nNever"]])
def test_a_stream_goes_on_from_wherever_it_broke_off(
    tokens: TokenServer, proxy: BreakingProxy, stop: Any
) -> None:
    unbroken = answer(endpoint(tokens.url), stream=True, stop=stop)
    backend = endpoint(proxy.url, GOING_ON)
    for cut in range(0, reply_bytes(tokens), 97):
        proxy.cuts = [cut]
        assert answer(backend, stream=True, stop=stop) == unbroken, cut


def test_a_stream_may_break_off_more_than_once(tokens: TokenServer, proxy: BreakingProxy) -> None:
    unbroken = answer(endpoint(tokens.url))
    proxy.cuts = [2000, 130, None, 1500]
    assert answer(endpoint(proxy.url, GOING_ON), stream=True) == unbroken
    assert proxy.cuts == []


def test_a_stream_whose_last_token_has_come_still_says_how_it_ended(
    tokens: TokenServer, proxy: BreakingProxy
) -> None:
    for most in (1, 9, 10):
        unbroken = answer(endpoint(tokens.url), max_tokens=most)
        for cut in range(110, 300 * most, 89):
            proxy.cuts = [cut]
            broken = answer(endpoint(proxy.url, GOING_ON), stream=True, max_tokens=most)
            assert broken == unbroken


def test_the_request_that_goes_on_asks_for_the_rest_only(
    tokens: TokenServer, proxy: BreakingProxy
) -> None:
    proxy.cuts = [2000]
    answer(endpoint(proxy.url, GOING_ON), stream=True)
    first, second = tokens.generating
    prompt, had = first["text"].encode(), len(second["input_ids"]) - len(first["text"])
    assert bytes(second["input_ids"]) == prompt + SCRIPT.encode()[:had]
    assert second["sampling_params"]["max_new_tokens"] == 100 - had
    assert had > 5
    eventually(lambda: first["rid"] in tokens.aborted)


@pytest.mark.parametrize("tells_places", [True, False])
@pytest.mark.parametrize("params", [{}, {"regex": ".*"}])
def test_a_retrieval_counts_once_although_its_answer_breaks_off(
    tokens: TokenServer,
    proxy: BreakingProxy,
    listed: Any,
    params: dict[str, Any],
    tells_places: bool,
) -> None:
    tokens.tells_places = tells_places

    @sgl.function
    def program(s: Any) -> None:
        s += rag_retrieve(listed, "animals", speculative=False)
        s += sgl.gen("answer", max_tokens=100, temperature=0, **params)

    proxy.cuts = [3000]
    state = program.run(backend=endpoint(proxy.url, GOING_ON), stream=True)
    assert "".join(state.text_iter("answer")) == SCRIPT
    first, *repeated = tokens.generating
    repeated += tokens.computing
    assert len(repeated) == (1 if params or tells_places else 2)

    def rag(body: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = body["sampling_params"]["custom_params"]["rag"]
        return found

    assert len(rag(first)["documents"]) == 2
    assert "counts" not in rag(first)
    assert [rag(body)["counts"] for body in repeated] == [False] * len(repeated)


@pytest.mark.parametrize("salt", [None, "secret"])
def test_what_goes_on_has_its_documents_and_its_salt_where_they_were(
    tokens: TokenServer, proxy: BreakingProxy, listed: Any, salt: str | None
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Ein Märchen: " + rag_retrieve(listed, "space", name="public", public=True)
        s += rag_retrieve(listed, "animals", name="private", speculative=False)
        s += sgl.gen("answer", max_tokens=100, temperature=0)

    backend = RagEndpoint(proxy.url, retries=GOING_ON, cache_salt=salt)
    proxy.cuts = [3000]
    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter("answer")) == SCRIPT
    first, second = tokens.generating
    before, after = (each["sampling_params"]["custom_params"]["rag"] for each in (first, second))
    text, ids = first["text"], bytes(second["input_ids"])
    assert [each["id"] for each in after["documents"]] == [
        "space/moon",
        "animals/cats",
        "animals/dogs",
    ]
    for old, new in zip(before["documents"], after["documents"], strict=True):
        assert ids[new["start"] : new["end"]].decode() == text[old["start"] : old["end"]]
    assert (after["unit"], after["counts"]) == ("token", False)
    assert after.get("salt_from") == before.get("salt_from") == (1 if salt else None)
    assert second.get("cache_salt") == salt
    assert [each.get("cache_salt") for each in tokens.placed] == [salt]


def test_an_answer_that_goes_on_otherwise_is_none(
    tokens: TokenServer, proxy: BreakingProxy
) -> None:
    backend = endpoint(proxy.url, GOING_ON)
    proxy.cuts = [2000]

    def change(seconds: float) -> None:
        tokens.script = SCRIPT.replace("fox", "cat")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._in_flight, "pause", lambda state, pause_s: change(pause_s))
        with pytest.raises(RequestError, match="another text after"):
            answer(backend, stream=True, stop="A fox’s 🦊 tail? No.")


@pytest.mark.parametrize("param", [{"frequency_penalty": 0.5}, {"regex": ".*"}])
def test_what_is_generated_as_a_whole_begins_again_and_what_was_shown_is_left_out(
    tokens: TokenServer, proxy: BreakingProxy, param: dict[str, Any]
) -> None:
    proxy.cuts = [2000]
    unbroken = answer(endpoint(tokens.url), **param)
    tokens.generating.clear()
    assert answer(endpoint(proxy.url, GOING_ON), stream=True, **param) == unbroken
    assert all("text" in body for body in tokens.generating)


def test_so_does_an_answer_of_a_server_that_does_not_tell_tokens(
    tokens: TokenServer, proxy: BreakingProxy
) -> None:
    tokens.tells_tokens = False
    proxy.cuts = [2000]
    assert answer(endpoint(proxy.url, GOING_ON), stream=True)[0] == SCRIPT
    assert all("text" in body for body in tokens.generating)


def test_a_server_that_comes_back_is_asked_again(tokens: TokenServer) -> None:
    backend = endpoint(tokens.url, Retries(attempts=1000, first_pause_s=0.01, longest_pause_s=0.02))
    tokens.close()
    reborn: list[TokenServer] = []
    timer = threading.Timer(0.05, lambda: reborn.append(TokenServer("Back.", tokens.port)))
    timer.start()
    assert answer(backend)[0] == "Back."
    reborn[0].close()


def test_a_server_that_starts_may_be_waited_for(tokens: TokenServer) -> None:
    tokens.statuses = [503, 503]
    assert answer(endpoint(tokens.url))[0] == SCRIPT
    assert tokens.statuses == []


@pytest.mark.parametrize("status", [500, 502, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_server_is_asked_again(
    tokens: TokenServer, status: int, stream: bool
) -> None:
    backend = endpoint(tokens.url)
    tokens.statuses = [status, status]
    assert answer(backend, stream=stream)[0] == SCRIPT
    # The error may be a gateway's, and the server still at work.
    eventually(lambda: len(tokens.aborted) == 2)


@pytest.mark.parametrize("status", [400, 401, 404, 429])
def test_a_refusal_is_final(tokens: TokenServer, status: int) -> None:
    backend = endpoint(tokens.url)
    tokens.statuses = [status]
    with pytest.raises(RequestError, match=f"refused the request: .*status {status}") as raised:
        answer(backend)
    assert type(raised.value) is RequestError
    assert raised.value.status == status
    assert tokens.generating == []


def test_a_silent_server_is_given_up_and_its_late_text_dropped(tokens: TokenServer) -> None:
    backend = endpoint(tokens.url, Retries(first_pause_s=0.001, silence_s=0.2, continues=True))
    tokens.stalls_after = 12

    def recover() -> None:
        tokens.stalled.wait()
        tokens.stalls_after = None

    threading.Thread(target=recover).start()
    assert answer(backend, stream=True)[0] == SCRIPT
    first = tokens.generating[0]["rid"]
    eventually(lambda: first in tokens.aborted)
    assert len(tokens.generating) >= 2  # the second may be silent for so long, too


def test_when_all_attempts_are_used_up_the_error_says_which(
    tokens: TokenServer, proxy: BreakingProxy, caplog: pytest.LogCaptureFixture
) -> None:
    backend = endpoint(proxy.url)
    proxy.cuts = [0] * 20
    with caplog.at_level(logging.WARNING), pytest.raises(ConnectionLost) as raised:
        answer(backend)
    assert f"{proxy.url}/generate gave no answer in 4 attempts" in str(raised.value)
    assert "Remote end closed connection" in str(raised.value)
    assert isinstance(raised.value.__cause__, ConnectionError)
    # A connection that was kept from an abort and broke off is no attempt.
    assert 4 <= len(tokens.generating) <= 8
    logged = [r.getMessage() for r in caplog.records if r.name == retries.__name__]
    assert len(logged) == 3
    assert logged[1].startswith(f"{proxy.url}/generate, attempt 2 of 4: ConnectionResetError: ")


def test_a_first_reply_that_is_cut_short_is_asked_for_again() -> None:
    server = Server()
    server.replies = [[OK[:-1], None]]
    endpoint(server.url)
    assert len(server.asked) == 2
    server.close()


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [(IncompleteRead(b""), True), (RemoteDisconnected(), True), (InvalidURL("a b"), False)],
)
def test_errors_of_http_are_transient_but_for_a_wrong_address(
    error: Exception, may_pass: bool
) -> None:
    assert retries.is_transient(error) is may_pass


def test_one_attempt_asks_once(tokens: TokenServer) -> None:
    backend = endpoint(tokens.url, Retries(attempts=1))
    tokens.statuses = [503]
    failed = r"in 1 attempt; .* the server failed at the request: .*status 503"
    with pytest.raises(ConnectionLost, match=failed) as raised:
        answer(backend)
    assert raised.value.status == 503


def test_a_choice_is_asked_for_again_too(server: SpeculativeServer, listed: Any) -> None:
    @sgl.function
    def choose(s: Any) -> None:
        s += rag_retrieve(listed, "animals", speculative=False) + sgl.select("kind", ["a", "b"])

    proxy = BreakingProxy(server.url)
    backend = endpoint(proxy.url)
    expected = choose.run(backend=backend)["kind"]
    proxy.cuts = [0, None, 10]
    assert choose.run(backend=backend)["kind"] == expected
    proxy.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_guess_is_never_asked_again(server: SpeculativeServer, stream: bool) -> None:
    proxy = BreakingProxy(server.url)
    backend = endpoint(proxy.url)
    proxy.cuts = [10]
    failed = lambda: eventually(lambda: backend.retrievals().failed)  # noqa: E731
    search = Scripted(GUESS, failed, GUESS)
    state = ask(search).run(backend=backend, stream=stream)
    assert state["answer"]
    assert len(server.speculations) == 1
    assert len(server.ordinary) == 1
    assert report_of(state).failed == 1
    proxy.close()


def test_a_guess_that_is_the_answer_goes_on_like_any(server: SpeculativeServer) -> None:
    proxy = BreakingProxy(server.url)
    backend = endpoint(proxy.url)
    server.hold, server.hold_after = lambda request: request.speculative, 0
    proxy.cuts = [150]
    state = ask(Scripted(GUESS, sent(server), GUESS)).run(backend=backend, stream=True)
    eventually(lambda: server.requests and server.requests[0].promoted)
    server.requests[0].go.set()
    assert "".join(state.text_iter("answer")) == state["answer"]
    assert len(server.requests) == 2
    assert report_of(state).kept == 1
    proxy.close()


def test_cancelling_ends_the_wait_for_the_next_attempt(tokens: TokenServer) -> None:
    backend = endpoint(tokens.url, Retries(first_pause_s=60, longest_pause_s=60))
    tokens.statuses = [503]

    @sgl.function
    def program(s: Any) -> None:
        s += "Tell me: " + sgl.gen("answer", max_tokens=5)

    state = program.run(backend=backend)
    eventually(lambda: not tokens.statuses)
    backend.cancel(state)
    with pytest.raises(RequestAborted, match="cancelled"):
        state["answer"]


def test_pauses_double_up_to_their_bound_and_differ_between_clients() -> None:
    settings = Retries(attempts=9, first_pause_s=1, longest_pause_s=10)
    assert [settings.pause_s(n) for n in (1, 2, 3, 4, 5, 5000)] == [1, 2, 4, 8, 10, 10]
    pauses: list[list[float]] = []
    for _ in range(2):
        pauses.append([])
        attempts = retries.Attempts(settings, "url", pauses[-1].append)
        with contextlib.suppress(ConnectionLost):
            while True:
                attempts.failed(ConnectionResetError())
        assert len(pauses[-1]) == 8
        for paused, longest in zip(pauses[-1], (1, 2, 4, 8, 10, 10, 10, 10), strict=True):
            assert longest / 2 <= paused <= longest
    assert pauses[0] != pauses[1]


@pytest.mark.parametrize(
    "wrong",
    [{"attempts": 0}, {"first_pause_s": -1}, {"longest_pause_s": -0.1}, {"silence_s": 0}],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Retries(**wrong)
