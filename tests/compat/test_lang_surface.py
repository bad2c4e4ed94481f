"""What the frontend takes for granted about SGLang's language; fails where SGLang changes it."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import sglang as sgl
from rag_radix_frontend import run_ahead, sglang_lang
from rag_radix_frontend.errors import IncompatibleSGLangError
from sglang.lang import interpreter
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.chat_template import get_chat_template
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglSamplingParams

STOCK_EXECUTOR = sglang_lang.RagStreamExecutor.__mro__[1]


def test_the_methods_the_subclasses_override_are_there() -> None:
    sglang_lang.check_surface()


def test_a_changed_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STOCK_EXECUTOR, "_execute_select", lambda self, expr, more: None)
    with pytest.raises(IncompatibleSGLangError, match=r"StreamExecutor\._execute_select takes"):
        sglang_lang.check_surface()
    monkeypatch.delattr(STOCK_EXECUTOR, "_execute_select")
    with pytest.raises(IncompatibleSGLangError, match="takes None"):
        sglang_lang.check_surface()


def test_the_interpreter_looks_its_classes_up_by_name() -> None:
    for function, name in [
        (interpreter.run_program, "StreamExecutor"),
        (interpreter.run_program, "ProgramState"),
        (interpreter.ProgramState.__mro__[1].fork, "ProgramStateGroup"),
        (STOCK_EXECUTOR.fork, "StreamExecutor"),
    ]:
        assert f"{name}(" in inspect.getsource(function)
        assert getattr(interpreter, name).__name__ == f"Rag{name}"


def stock_executor(**arguments: Any) -> Any:
    backend = sgl.lang.backend.base_backend.BaseBackend()
    return STOCK_EXECUTOR(backend, {}, SglSamplingParams(stop=[]), None, False, **arguments)


def test_a_state_consists_of_what_is_copied_to_run_ahead_and_of_what_a_copy_needs_not() -> None:
    copied = set(re.findall(r"state\.(\w+) = ", inspect.getsource(run_ahead._copy)))
    given = {"backend", "arguments", "default_sampling_para", "chat_template"}
    own = {"sid", "stream", "use_thread", "stream_text_event", "stream_var_event"}
    not_needed = {"meta_info", "is_finished", "error_", "num_api_spec_tokens", "speculated_text"}
    assert set(vars(stock_executor(use_thread=False))) == copied | given | own | not_needed


def test_a_list_is_executed_one_by_one() -> None:
    source = inspect.getsource(STOCK_EXECUTOR._execute)
    assert "for x in other.expr_list:\n                self._execute(x)" in source


def test_the_queue_shows_what_is_to_come_and_none_for_the_end() -> None:
    executor = stock_executor()
    with executor.queue.mutex:
        assert list(executor.queue.queue) == []
    executor.end()
    executor.worker.join()


def test_stock_still_extends_the_stop_strings_of_an_expression() -> None:
    """Once this fails, `RagStreamExecutor._resolve_sampling_params` can go."""
    executor = stock_executor(use_thread=False)
    executor.chat_template = get_chat_template("chatml")
    gen = sgl.gen("x", stop=["a"])
    executor._resolve_sampling_params(gen.sampling_params)
    assert gen.sampling_params.stop == ["a", "<|im_end|>"]


def test_a_text_is_copied_with_str_when_a_state_forks() -> None:
    source = inspect.getsource(STOCK_EXECUTOR.fork)
    assert "text_ = str(self.text_)" in source


def test_the_text_a_request_sends_is_the_one_of_the_state() -> None:
    for method in (RuntimeEndpoint.select, RuntimeEndpoint.commit_lazy_operations):
        assert '"text": s.text_' in inspect.getsource(method)
    assert "self._generate_http_request(s, data)" in inspect.getsource(RuntimeEndpoint.select)


def test_stock_still_loses_the_failure_of_a_program() -> None:
    """Once this fails, SGLang raises by itself and `RagStreamExecutor.get_var` can go."""

    class Failing(sgl.lang.backend.base_backend.BaseBackend):  # type: ignore[misc, name-defined]
        def generate(self, s: StreamExecutor, sampling_params: object) -> None:
            raise LookupError("lost")

    executor = STOCK_EXECUTOR(Failing(), {}, interpreter.SglGen("x").sampling_params, None, False)
    executor.submit(sgl.gen("x"))
    with (
        pytest.warns(UserWarning, match="lost"),
        pytest.raises(KeyError, match="x"),
    ):
        executor.get_var("x")
    executor.end()
