"""What a program will ask of its backend next, if a retrieval ends with these documents.

A copy of the program's state executes what follows the retrieval with SGLang's own methods, so
that its text is, character for character, the one that the state itself will have.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sglang.lang.ir import (
    SglConstantText,
    SglExprList,
    SglGen,
    SglRoleBegin,
    SglRoleEnd,
    SglSamplingParams,
    SglSelect,
    SglVarScopeBegin,
    SglVarScopeEnd,
)

from rag_radix_frontend.sglang_lang import RagStreamExecutor, StockStreamExecutor, own_params

Method = Literal["generate", "generate_stream", "select"]

# Expressions that take nothing but the state itself.
_PLAIN = (str, SglConstantText, SglRoleBegin, SglRoleEnd, SglVarScopeBegin, SglVarScopeEnd)


@dataclass(frozen=True, slots=True)
class Call:
    """A method of a backend, called for a state.

    `state` is a copy that nothing else uses, so it stands for the call: its requests are its own.
    """

    state: StockStreamExecutor
    method: Method
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        return getattr(self.state.backend, self.method)(self.state, *self.arguments)


class _Params(SglSamplingParams):
    """A program's sampling parameters. SGLang copies them deeply for each call, of which a list of
    stop strings is all that it changes; that was a tenth of the CPU time of a guess."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Any:
        return own_params(SglSamplingParams(**vars(self)))


def next_call(executor: RagStreamExecutor, name: str, text: str) -> Call | None:
    """The call after the expression being executed, were `text` its result under `name`.

    None where the program hasn't come to one yet, or where something comes first that only the
    program itself can do: another retrieval, an image, work of other states.
    """
    # SGLang's own speculation, for chat APIs, makes several calls of one.
    if executor.num_api_spec_tokens is not None:
        return None
    state = _copy(executor)
    try:
        state._execute_fill(text)
        state.variables[name] = text
        for expr in _leaves(executor.following()):
            if isinstance(expr, SglGen):
                return _generate(state, expr, executor.stream)
            if type(expr) is SglSelect:
                arguments = (expr.choices, expr.temperature, expr.choices_method)
                return Call(state, "select", arguments)
            if not isinstance(expr, _PLAIN):
                return None
            state._init_var_event(expr)
            state._execute(expr)
    except Exception:
        # It fails again when its turn comes, and then in the program.
        return None
    return None


def _generate(state: StockStreamExecutor, expr: SglGen, stream: bool) -> Call | None:
    params = state._resolve_sampling_params(own_params(expr.sampling_params))
    # Several samples are several requests at the server, which can't be aborted.
    if params.n != 1:
        return None
    return Call(state, "generate_stream" if stream else "generate", (params,))


def _leaves(exprs: Iterable[Any]) -> Iterator[Any]:
    for expr in exprs:
        if isinstance(expr, SglExprList):
            yield from _leaves(expr.expr_list)
        else:
            yield expr


def _copy(executor: RagStreamExecutor) -> StockStreamExecutor:
    state = StockStreamExecutor(
        executor.backend,
        executor.arguments,
        _Params(**vars(executor.default_sampling_para)),
        executor.chat_template,
        stream=False,
        use_thread=False,
    )
    state.variables = dict(executor.variables)
    # Scopes may have begun before the copy was made.
    state.variable_event = defaultdict(threading.Event)
    state.text_ = executor.text_
    state.messages_ = list(executor.messages_)
    state.cur_role = executor.cur_role
    state.cur_role_begin_pos = executor.cur_role_begin_pos
    state.images_ = list(executor.images_)
    state.cur_images = list(executor.cur_images)
    state.fork_start_text_pos = executor.fork_start_text_pos
    return state
