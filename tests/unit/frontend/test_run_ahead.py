"""What a copy of a state makes of the expressions that follow, against the state itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sglang as sgl
from hypothesis import given, settings
from hypothesis import strategies as st
from rag_radix_frontend.run_ahead import Call, next_call
from rag_radix_frontend.sglang_lang import ComputedText, RagStreamExecutor
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template
from sglang.lang.ir import SglConstantText, SglExprList, SglSamplingParams

TEXT = "documents "


class Recorder(BaseBackend):  # type: ignore[misc]
    """A backend that notes what it is asked first."""

    def __init__(self) -> None:
        super().__init__()
        self.chat_template = get_chat_template("llama-2-chat")
        self.asked: list[tuple[Any, ...]] = []

    def generate(self, s: Any, sampling_params: SglSamplingParams) -> tuple[str, dict[str, Any]]:
        self.asked.append(("generate", *_state(s), sampling_params))
        return "", {}

    def select(self, s: Any, choices: Any, temperature: Any, choices_method: Any) -> Any:
        self.asked.append(("select", *_state(s), choices))
        return sgl.lang.choices.ChoicesDecision(choices[0], {})


def _state(s: Any) -> tuple[Any, ...]:
    return s.text_, list(s.messages_), s.cur_role, list(s.images_)


class Computed(ComputedText):
    """The retrieval: asks what comes next, as it is when its turn has come."""

    def __init__(self) -> None:
        super().__init__("docs")
        self.call: Call | None = None

    def compute(self, executor: RagStreamExecutor) -> str:
        self.call = next_call(executor, self.name, TEXT)
        return TEXT


@pytest.fixture
def backend() -> Recorder:
    return Recorder()


def foreseen(
    backend: Recorder, before: Callable[[Any], None], after: Callable[[Any], None]
) -> tuple[Any, ...] | None:
    """What is foreseen, once it is checked to be what is asked."""
    computed = Computed()

    @sgl.function
    def program(s: Any) -> None:
        before(s)
        s.stream_executor.sync()
        backend.asked.clear()
        # One expression, so that what follows is known whenever the thread gets to it.
        collected: list[Any] = []
        original = s.stream_executor.submit
        s.stream_executor.submit = collected.append
        s += computed
        after(s)
        s.stream_executor.submit = original
        s += SglExprList([SglConstantText(e) if isinstance(e, str) else e for e in collected])

    program.run(backend=backend).sync()
    if computed.call is None:
        return None
    call = computed.call
    first = backend.asked[0]
    argument = call.arguments[0]
    assert (call.method, *_state(call.state), argument) == first
    return first


_TEXTS = st.text("ab\n <", min_size=1, max_size=4)
_BODIES = st.lists(_TEXTS, min_size=1, max_size=3)
_STEPS = st.lists(
    st.tuples(st.sampled_from(["text", "system", "user", "assistant", "scope", "sum"]), _BODIES),
    max_size=4,
)


def _append(s: Any, steps: list[tuple[str, list[str]]]) -> None:
    for i, (kind, texts) in enumerate(steps):
        if kind == "text":
            for text in texts:
                s += text
        elif kind == "sum":
            s += SglExprList([SglConstantText(text) for text in texts]) + "."
        elif kind == "scope":
            with s.var_scope(f"scope{i}"):
                _append(s, [("text", texts)])
        else:
            with getattr(s, kind)():
                _append(s, [("text", texts)])


@settings(max_examples=150, deadline=None)
@given(_STEPS, _STEPS, st.sampled_from(["gen", "select"]))
def test_what_is_foreseen_is_what_is_asked(
    before: list[tuple[str, list[str]]], after: list[tuple[str, list[str]]], kind: str
) -> None:
    def rest(s: Any) -> None:
        _append(s, after)
        s += sgl.gen("answer", stop=["x"]) if kind == "gen" else sgl.select("answer", ["x", "y"])
        s += "more" + sgl.gen("other")

    assert foreseen(Recorder(), lambda s: _append(s, before), rest) is not None


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_retrieval_within_a_role_goes_on_in_it(backend: Recorder, role: str) -> None:
    def before(s: Any) -> None:
        s += sgl.user("Hello") + sgl.assistant("Hi")
        s += getattr(sgl, f"{role}_begin")()

    def after(s: Any) -> None:
        s += "question" + getattr(sgl, f"{role}_end")() + sgl.assistant(sgl.gen("answer"))

    assert foreseen(backend, before, after) is not None


def test_the_own_variable_and_scopes_that_have_begun_are_known(backend: Recorder) -> None:
    def before(s: Any) -> None:
        s += sgl.lang.ir.SglVarScopeBegin("whole")

    def after(s: Any) -> None:
        s += "b" + sgl.lang.ir.SglVarScopeEnd("whole") + sgl.gen("answer")

    assert foreseen(backend, before, after) is not None


@pytest.mark.parametrize(
    "barrier",
    [
        Computed(),
        sgl.image(b"picture"),
        sgl.gen("two", n=2),
        sgl.lang.ir.SglCommitLazy(),
        sgl.lang.ir.SglSeparateReasoning("qwen3", sgl.gen("thought")),
        sgl.lang.ir.SglRoleEnd("nobody") + sgl.lang.ir.SglVarScopeEnd("never begun"),
    ],
)
def test_what_needs_more_than_the_state_is_not_foreseen(backend: Recorder, barrier: Any) -> None:
    computed = Computed()
    executor = RagStreamExecutor(backend, {}, SglSamplingParams(), None, False, use_thread=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "following", lambda: iter(["a", barrier, sgl.gen("answer")]))
        computed.compute(executor)
    assert computed.call is None


def test_the_state_itself_is_not_touched(backend: Recorder) -> None:
    executor = RagStreamExecutor(backend, {}, SglSamplingParams(), None, False, use_thread=False)
    executor.submit("before ")
    gen = sgl.gen("answer", stop=["x"])
    following = [sgl.user("question"), sgl.lang.ir.SglVarScopeBegin("v"), gen]
    known = {k: v for k, v in vars(executor).items() if k in ("text_", "messages_", "variables")}
    snapshot = {k: v if isinstance(v, str) else type(v)(v) for k, v in known.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "following", lambda: iter(following))
        assert next_call(executor, "docs", TEXT) is not None
    assert {k: vars(executor)[k] for k in snapshot} == snapshot
    assert gen.sampling_params.stop == ["x"]
