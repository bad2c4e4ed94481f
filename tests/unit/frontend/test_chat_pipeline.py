"""`retrieve_and_generate()`: which guesses are sent, and which become the answer."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from rag_radix_frontend import Document, chat_pipeline, chat_retrievals, retrieve_and_generate
from rag_radix_frontend.chat_pipeline import _server_of, _servers
from rag_radix_frontend.chat_server import ChatServer
from unit.frontend.chat_client import LIMIT_S, A, B, FakeClient, ask, run


def test_a_speculation_on_the_final_documents_is_the_answer():
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        assert guess.speculative
        steps.send(A, final=True)
        guess.finish("yes")
        result = await answer
        assert result.completion == "yes"
        assert [scored.document for scored in result.documents] == [A]
        assert len(client.requests) == 1
        await client.promotion()
        assert client.promoted == [guess.rid]
        assert (result.retrieval.started, result.retrieval.kept) == (1, 1)
        assert result.retrieval.search_not_overlapped_s < result.retrieval.search_s
        assert chat_retrievals(client) == result.retrieval

    run(scenario)


def test_other_final_documents_end_it_and_are_asked_for():
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        steps.send(B, final=True)
        request = await client.request(1)
        assert not request.speculative
        assert request.content == "text of b"
        request.finish("no")
        result = await answer
        assert result.completion == "no"
        while not guess.ended:
            await asyncio.sleep(0)
        assert client.aborted == [guess.rid]
        assert (result.retrieval.cancelled, result.retrieval.kept) == (1, 0)
        assert result.retrieval.search_not_overlapped_s == result.retrieval.search_s

    run(scenario)


@pytest.mark.parametrize("is_complete", [False, True])
def test_what_a_wrong_guess_computed_is_told_where_the_server_tells(is_complete):
    usage = {"prompt_tokens": 100, "completion_tokens": 7}

    async def scenario(client, steps):
        client.usage = {**usage, "prompt_tokens_details": {"cached_tokens": 60}}
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        if is_complete:
            guess.finish("long since")
            while not guess.ended:
                await asyncio.sleep(0)
        steps.send(B, final=True)
        (await client.request(1)).finish("no")
        result = await answer
        while result.retrieval.wasted_tokens != 47:
            await asyncio.sleep(0)
        assert chat_retrievals(client) == result.retrieval

    run(scenario)


def test_a_stream_goes_on_from_what_is_there():
    async def scenario(client, steps):
        answer = ask(client, steps, stream=True)
        steps.send(A)
        guess = await client.request(0)
        guess.pieces.put_nowait("one")
        steps.send(A, final=True)
        result = await answer
        seen = []
        async for chunk in result.completion:
            seen.append(chunk)
            if chunk == "one":
                guess.finish("two")
        assert seen == ["one", "two"]
        assert len(client.requests) == 1

    run(scenario)


def test_a_stream_that_is_left_is_ended():
    async def scenario(client, steps):
        answer = ask(client, steps, stream=True)
        steps.send(A)
        guess = await client.request(0)
        guess.pieces.put_nowait("one")
        steps.send(A, final=True)
        chunks = (await answer).completion
        async for _ in chunks:
            break
        await chunks.aclose()
        while not guess.ended:
            await asyncio.sleep(0)
        assert client.aborted == [guess.rid]

    run(scenario)


def test_a_complete_answer_needs_no_reply():
    async def scenario(client, steps):
        client.promoting.clear()
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        guess.finish("yes")
        await guess.end()
        steps.send(A, final=True)
        result = await answer
        assert result.completion == "yes"
        assert result.retrieval.kept == 1
        # The server counts the answer by that.
        await client.promotion()
        assert client.promoted == [guess.rid]
        client.promoting.set()

    run(scenario)


def test_an_answer_that_becomes_complete_waits_no_longer_for_a_reply():
    async def scenario(client, steps):
        client.promoting.clear()
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        steps.send(A, final=True)
        await client.promotion()
        guess.finish("yes")
        assert (await answer).completion == "yes"
        assert len(client.requests) == 1
        client.promoting.set()

    run(scenario)


def test_nothing_is_handed_out_before_the_reply():
    async def scenario(client, steps):
        client.promoting.clear()
        answer = ask(client, steps, stream=True)
        steps.send(A)
        guess = await client.request(0)
        guess.pieces.put_nowait("one")
        steps.send(A, final=True)
        await client.promotion()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not answer.done()
        client.promoting.set()
        chunks = (await answer).completion
        assert await anext(chunks) == "one"
        guess.finish()
        assert [chunk async for chunk in chunks] == []

    run(scenario)


def with_distance(distance):
    """A, as a retriever returns it that notes more than a text."""
    metadata = {"embedding": np.arange(3.0), "distance": distance}
    return Document(A.id, A.text, metadata=metadata)


def test_metadata_that_changes_is_no_change_of_the_documents():
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(with_distance(0.5))
        guess = await client.request(0)
        steps.send(with_distance(0.25))
        steps.send(with_distance(0.125), final=True)
        guess.finish("yes")
        result = await answer
        assert result.completion == "yes"
        assert result.documents[0].document.metadata["distance"] == 0.125
        assert (result.retrieval.started, result.retrieval.kept) == (1, 1)

    run(scenario)


def test_messages_are_those_with_the_final_metadata():
    def quoting(documents):
        return [
            {"role": "user", "content": f"{each.text} ({each.metadata['distance']})"}
            for each in documents
        ]

    async def scenario(client, steps):
        answer = asyncio.create_task(retrieve_and_generate(client, steps, "?", quoting))
        steps.send(with_distance(0.5))
        guess = await client.request(0)
        assert guess.content == "text of a (0.5)"
        steps.send(with_distance(0.25), final=True)
        request = await client.request(1)
        assert request.content == "text of a (0.25)"
        request.finish("yes")
        result = await answer
        assert result.completion == "yes"
        assert (result.retrieval.cancelled, result.retrieval.kept) == (1, 0)
        await guess.end()

    run(scenario)


def test_what_the_server_doesnt_promote_is_asked_for_again():
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        guess = await client.request(0)
        client.states[guess.rid] = "unknown"
        steps.send(A, final=True)
        request = await client.request(1)
        assert not request.speculative
        request.finish("normal")
        assert (await answer).completion == "normal"

    run(scenario)


@pytest.mark.parametrize("said", ["speculation refused: 4 wait", "speculation ended: 1 waits"])
def test_a_candidate_turned_away_starts_when_the_pool_drains(said):
    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        first = await client.request(0)
        client.pool = {"waiting": 4, "max_prefill_bs": 4, "accepts": False}
        first.pieces.put_nowait(RuntimeError(said))
        await asyncio.sleep(0.1)
        assert len(client.requests) == 1
        client.pool = {"waiting": 3, "max_prefill_bs": 4, "accepts": True}
        second = await client.request(1)
        assert second.speculative
        assert second.rid != first.rid
        second.finish("late")
        steps.send(A, final=True)
        result = await answer
        assert result.completion == "late"
        assert (result.retrieval.started, result.retrieval.kept) == (2, 1)
        assert result.retrieval.refused + result.retrieval.ended == 1
        assert result.retrieval.withheld == 1, "once, before the server was asked"

    run(scenario)


def test_a_full_server_is_sent_no_speculations():
    async def scenario(client, steps):
        client.pool = {"waiting": 4, "max_prefill_bs": 4, "accepts": False}
        answer = ask(client, steps)
        for _ in range(2):
            steps.send(A)
            steps.send(B)
        steps.send(A, final=True)
        request = await client.request(0)
        assert not request.speculative
        request.finish("normal")
        result = await answer
        assert result.completion == "normal"
        assert result.retrieval.started == 0

    run(scenario)


def test_speculation_can_be_off_and_is_for_several_samples():
    async def scenario(client, steps):
        for options in ({"speculative": False}, {"n": 2}):
            answer = ask(client, steps, **options)
            steps.send(A)
            steps.send(A, final=True)
            request = await client.request(len(client.requests))
            assert not request.speculative
            request.finish("x")
            assert (await answer).completion == "x"

    run(scenario)


def test_event_loops_that_share_a_client_keep_what_they_know_of_its_server():
    async def server() -> ChatServer:
        return _server_of(client)

    client = FakeClient()
    loops = [asyncio.new_event_loop() for _ in range(2)]
    first, second, again = (loops[i].run_until_complete(server()) for i in (0, 1, 0))
    assert first is again
    assert first is not second
    for loop in loops:
        loop.close()
    asyncio.run(server())
    assert len(_servers[client]) == 1


def test_what_is_replaced_at_once_is_never_sent(monkeypatch):
    monkeypatch.setattr(chat_pipeline, "_LONGEST_PAUSE_S", LIMIT_S)
    # Every look at the clock finds that the search has taken so long.
    clock = SimpleNamespace(perf_counter=itertools.count(step=LIMIT_S).__next__)
    monkeypatch.setattr(chat_pipeline, "time", clock)

    async def scenario(client, steps):
        answer = ask(client, steps)
        steps.send(A)
        steps.send(B)
        steps.send(A, final=True)
        request = await client.request(0)
        assert not request.speculative
        request.finish("yes")
        result = await answer
        assert (result.retrieval.started, result.retrieval.cancelled) == (0, 0)

    run(scenario)
