"""A stream shows all of its text to every reader."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import sglang as sgl
from unit.frontend.speculative_server import SpeculativeServer, eventually


@sgl.function
def program(s: Any) -> None:
    s += "Question? "
    s += sgl.gen("answer")
    s += " Next? " + sgl.gen("more")


def read(state: Any, name: str | None, asynchronous: bool, pause_s: float = 0.0) -> list[Any]:
    async def read_async() -> list[Any]:
        pieces = []
        async for piece in state.text_async_iter(name):
            pieces.append(piece)
            time.sleep(pause_s)
        return pieces

    if asynchronous:
        return asyncio.run(read_async())
    pieces = []
    for piece in state.text_iter(name):
        pieces.append(piece)
        time.sleep(pause_s)
    return pieces


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", [None, "answer", "more"])
@pytest.mark.parametrize("pause_s", [0.0, 0.03])
def test_a_reader_at_any_speed_sees_all(
    backend: Any, name: str | None, asynchronous: bool, pause_s: float
) -> None:
    state = program.run(backend=backend, stream=True)
    text = "".join(read(state, name, asynchronous, pause_s))
    assert text == (state.text() if name is None else state[name])
    assert len(text) > 5


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", [None, "answer", "more"])
def test_readers_after_the_end_see_all(backend: Any, name: str | None, asynchronous: bool) -> None:
    state = program.run(backend=backend, stream=True)
    eventually(lambda: state.stream_executor.is_finished)
    for _ in range(3):
        text = "".join(read(state, name, asynchronous))
        assert text == (state.text() if name is None else state[name])


def test_the_rest_of_a_stream_comes_with_its_meta_data(
    server: SpeculativeServer, backend: Any
) -> None:
    async def read_with_meta() -> list[Any]:
        pieces = []
        async for piece in state.text_async_iter("answer", return_meta_data=True):
            pieces.append(piece)
            await asyncio.sleep(0.05)
        return pieces

    state = program.run(backend=backend, stream=True)
    pieces = asyncio.run(read_with_meta())
    assert "".join(text for text, _ in pieces) == state["answer"]
    assert pieces[-1][1]["finish_reason"] == {"type": "stop"}


@pytest.mark.parametrize("name", [None, "answer"])
def test_a_late_reader_of_meta_data_gets_what_a_punctual_one_would(
    backend: Any, name: str | None
) -> None:
    async def pieces(state: Any) -> list[Any]:
        return [p async for p in state.text_async_iter(name, return_meta_data=True)]

    state = program.run(backend=backend, stream=True)
    eventually(lambda: state.stream_executor.is_finished)
    read = asyncio.run(pieces(state))
    if name is None:  # of a whole text SGLang gives none
        assert "".join(read) == state.text()
    else:
        assert "".join(text for text, _ in read) == state[name]
        assert read[-1][1] == state.get_meta_info(name)


def test_the_rest_of_a_whole_text_has_no_meta_data(backend: Any) -> None:
    async def pieces(state: Any) -> list[Any]:
        read = []
        async for piece in state.text_async_iter(return_meta_data=True):
            read.append(piece)
            time.sleep(0.03)
        return read

    state = program.run(backend=backend, stream=True)
    assert "".join(asyncio.run(pieces(state))) == state.text()
