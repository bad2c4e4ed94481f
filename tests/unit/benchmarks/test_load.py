"""The client of a load where there is nobody to answer."""

from __future__ import annotations

import asyncio
import time

import pytest
from rag_radix_benchmarks.completions import ask_completion
from rag_radix_benchmarks.load import PROBE_S, LoadError, ask_generate, closed_loop, open_loop
from unit.benchmarks.comparison_data import ARMS, result_of

NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize("ask", [ask_generate, ask_completion])
def test_a_server_that_went_away_is_named(ask):
    with pytest.raises(LoadError, match=f"{NOBODY}.*doesn't answer.*log"):
        closed_loop(NOBODY, [{}, {}], concurrency=1, ask=ask)
    with pytest.raises(LoadError, match=f"{NOBODY}.*doesn't answer.*log"):
        open_loop(NOBODY, [{}], due_s=[0.0], ask=ask)


OUTCOME = result_of(ARMS[0], 0.5).run.outcomes[0]


def test_an_open_loop_sends_when_due_whatever_became_of_those_before():
    due_s = [0.0, 0.005, 0.02]
    all_sent = []

    async def ask(session, url, payload, due):
        assert time.perf_counter() >= due - 0.002  # an event loop's timers count milliseconds
        all_sent.append(due)
        # The first is answered only after the last one came.
        while len(all_sent) < len(due_s):
            await asyncio.sleep(0)
        return OUTCOME

    run = open_loop(NOBODY, [{}] * 3, due_s, ask)
    assert run.due_s == pytest.approx(due_s)
    first = all_sent[0]
    assert [due - first for due in all_sent] == pytest.approx(due_s)


def test_a_closed_loop_keeps_so_many_under_way():
    under_way, most = 0, 0

    async def ask(session, url, payload, due):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return OUTCOME

    assert len(closed_loop(NOBODY, [{}] * 7, 3, ask).outcomes) == 7
    assert most == 3


def test_a_client_that_is_busy_itself_says_by_how_much_it_was_late():
    async def ask(session, url, payload, due):
        # The probe begins, and nothing else can run until long after it was due.
        await asyncio.sleep(0)
        time.sleep(3 * PROBE_S)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return OUTCOME

    assert closed_loop(NOBODY, [{}], 1, ask).lag_s > PROBE_S
