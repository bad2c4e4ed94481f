from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping

import pytest
from rag_radix_frontend import promotion as module
from rag_radix_frontend.promotion import Promoter
from unit.frontend.speculative_server import WAIT_S, eventually, no_more_threads

pytestmark = pytest.mark.usefixtures("no_threads_left")


def ask(promoter: Promoter, *rids: str, is_over: bool = False) -> list[bool]:
    replies: list[bool] = []
    promoter.ask(list(rids), is_over=lambda: is_over, reply=replies.append)
    return replies


@pytest.mark.parametrize("state", ["running", "finished"])
def test_what_runs_or_has_finished_is_promoted(state: str) -> None:
    replies = ask(Promoter(lambda rids: dict.fromkeys(rids, state)), "a", "b")
    eventually(lambda: replies == [True])


def test_all_requests_of_a_call_must_be_known() -> None:
    promoter = Promoter(lambda rids: {"a": "running", "b": "unknown"})
    replies = ask(promoter, "a", "b", is_over=True)
    eventually(lambda: replies == [False])


def test_what_waits_meanwhile_is_asked_together() -> None:
    asked: list[list[str]] = []
    go = threading.Event()

    def promote(rids: list[str]) -> Mapping[str, str]:
        asked.append(rids)
        go.wait(WAIT_S)
        return dict.fromkeys(rids, "running")

    promoter = Promoter(promote)
    first = ask(promoter, "a")
    eventually(lambda: asked)
    others = [ask(promoter, str(i)) for i in range(20)]
    go.set()
    eventually(lambda: all(replies == [True] for replies in (first, *others)))
    assert asked == [["a"], [str(i) for i in range(20)]]


def test_what_is_unknown_is_asked_again_until_it_has_arrived() -> None:
    states = iter(["unknown", "unknown", "running"])
    replies = ask(Promoter(lambda rids: {rids[0]: next(states)}), "a")
    eventually(lambda: replies == [True])


def test_what_stays_unknown_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    replies = ask(Promoter(lambda rids: {}), "a")
    eventually(lambda: replies == [False])


def test_a_server_that_fails_promotes_nothing() -> None:
    def promote(rids: list[str]) -> Mapping[str, str]:
        raise ConnectionRefusedError

    promoter = Promoter(promote)
    one, other = ask(promoter, "a"), ask(promoter, "b")
    eventually(lambda: (one, other) == ([False], [False]))


def test_without_a_thread_to_ask_nothing_is_promoted_until_there_is_one_again() -> None:
    promoter = Promoter(lambda rids: dict.fromkeys(rids, "running"))
    with no_more_threads():
        assert ask(promoter, "a") == [False]
    replies = ask(promoter, "b")
    eventually(lambda: replies == [True])


def test_a_server_that_does_not_answer_does_not_keep_the_process_from_ending() -> None:
    program = """
import threading
from rag_radix_frontend.promotion import Promoter
asked = threading.Event()
Promoter(lambda rids: asked.set() or threading.Event().wait()).ask(
    ["a"], is_over=lambda: False, reply=print
)
asked.wait()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT_S)


def test_a_promotion_is_made_although_the_process_ends() -> None:
    program = """
import time
from rag_radix_frontend.promotion import Promoter
Promoter(lambda rids: time.sleep(0.1) or {"a": "running"}).ask(
    ["a"], is_over=lambda: False, reply=print
)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, timeout=WAIT_S, capture_output=True, text=True)
    assert done.stdout == "True\n"
