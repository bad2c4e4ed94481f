"""Warming gives way, and goes on."""

from __future__ import annotations

import asyncio

from rag_radix.control import warming
from rag_radix.control.warming import Busy, Progress, WarmDocument, Warming, WarmOrder, request_body


def test_a_document_that_is_refused_is_tried_again(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(warming.asyncio, "sleep", sleep)
    answers = iter([Busy(), Busy(), 100, Busy(), 50])

    async def generate(body):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run():
        documents = tuple(WarmDocument(name, "", [1, 2]) for name in "ab")
        job = Warming(generate)
        job.start(WarmOrder([7], documents, tokens_per_s=100.0))
        await job._task
        return job.progress

    progress = asyncio.run(run())
    assert progress == Progress("done", 2, warmed=2, tokens=150, refusals=3)
    assert waits == [0.1, 0.2, 1.0, 0.1, 0.5]


def test_tokens_are_sent_as_tokens():
    body = request_body([1, 2, 3], WarmDocument("a", "1", [4, 5]))
    assert body["input_ids"] == [1, 2, 3, 4, 5]
    rag = body["sampling_params"]["custom_params"]["rag"]
    assert rag["documents"] == [{"id": "a", "version": "1", "start": 3, "end": 5}]
    assert rag["unit"] == "token"
