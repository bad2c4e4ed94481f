"""What the frontend takes for granted about SGLang's language; fails where SGLang changes it."""

from __future__ import annotations

import inspect

import pytest
import sglang as sgl
from rag_radix_frontend import sglang_lang
from rag_radix_frontend.errors import IncompatibleSGLangError
from sglang.lang import interpreter
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.interpreter import StreamExecutor

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
