"""Warming gives way, and goes on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from unit.test_cost_model import TABLE

from rag_radix.control import warming
from rag_radix.control.warming import Busy, Progress, WarmDocument, Warming, WarmOrder, request_body
from rag_radix.errors import ConfigError, ControlError
from rag_radix.settings import parse_settings


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


def answered(*answers):
    """A tokenizer manager that answers one request after the other so."""
    left = iter(answers)

    async def generate_request(_request):
        yield {"meta_info": next(left)}

    return SimpleNamespace(generate_request=generate_request)


def test_what_was_aborted_is_tried_again(monkeypatch):
    async def sleep(seconds):
        pass

    monkeypatch.setattr(warming.asyncio, "sleep", sleep)
    aborted = {"type": "abort", "message": "Abort"}
    manager = answered(
        {"finish_reason": aborted, "completion_tokens": 0},  # while it waited
        {"finish_reason": aborted, "prompt_tokens": 3},  # while it ran
        {"finish_reason": {"type": "length"}, "prompt_tokens": 3},
    )

    async def run():
        job = Warming(warming.generator(lambda: manager))
        job.start(WarmOrder([7], (WarmDocument("a", "", [1, 2]),)))
        await job._task
        return job.progress

    assert asyncio.run(run()) == Progress("done", 1, warmed=1, tokens=3, refusals=2)


def test_a_failure_that_nobody_expects_stops_and_is_told(caplog):
    async def generate(body):
        raise RuntimeError("no such thing")

    async def run():
        job = Warming(generate)
        order = WarmOrder([7], (WarmDocument("a", "", [1, 2]),))
        job.start(order)
        await job._task
        job.start(order)  # another one may begin
        await job._task
        return job.progress

    assert asyncio.run(run()) == Progress("stopped", 1, problem="RuntimeError: no such thing")
    assert "warming has stopped" in caplog.text
    assert "Traceback" in caplog.text


def test_tokens_are_sent_as_tokens():
    document = WarmDocument("a", "1", [4, 5])
    body = request_body(WarmOrder([1, 2, 3], (document,)), document)
    assert body["input_ids"] == [1, 2, 3, 4, 5]
    rag = body["sampling_params"]["custom_params"]["rag"]
    assert rag["documents"] == [{"id": "a", "version": "1", "start": 3, "end": 5}]
    assert rag["unit"] == "token"


def test_an_order_at_start_is_read_before_the_server_is_up(tmp_path):
    path = tmp_path / "warm.json"

    def start(**config):
        warming.at_start(SimpleNamespace(radix_eviction_policy_config=config))

    start()
    with pytest.raises(ControlError, match="No such file"):
        start(warm=str(path))
    path.write_text("{}")
    with pytest.raises(ControlError, match='"documents" must be an array'):
        start(warm=str(path))
    with pytest.raises(ConfigError, match="give the name of a file that there is"):
        parse_settings("pgdsf", {"warm": str(tmp_path / "none")}, lambda: TABLE)
    assert parse_settings("pgdsf", {"warm": str(path)}, lambda: TABLE).warm == str(path)
