"""What is changed in SGLang's frontend language. This and `run_ahead` touch its inside.

SGLang runs a program's expressions on a thread of the state. Four things are added to it:

- `ComputedText`, an expression whose text a function computes on that thread. To the rest of
  SGLang it is a `select`: an expression that appends a text and sets a variable.
- While an expression is executed, an executor knows what follows it, as far as the program has
  said: programs run ahead of their executor.
- A stream shows all of its text, also to a slow or late reader.
- A failure on that thread reaches the program. SGLang 0.5.23 only warns: reading a variable
  then raises `KeyError`, appending to the state or waiting for it may never return, and a
  broken stream looks like a complete one. Here reading, appending, forking and joining raise
  the failure itself, `sync()` returns, and `error()` gives the failure.

Importing this module puts the subclasses in place of SGLang's classes, which SGLang looks up by
name when it starts or forks a program. It stops with `IncompatibleSGLangError` where SGLang
doesn't have the methods that they override.
"""

from __future__ import annotations

import copy
import inspect
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang.lang import interpreter
from sglang.lang.interpreter import ProgramState, ProgramStateGroup, StreamExecutor
from sglang.lang.ir import SglExprList, SglSelect

from rag_radix_frontend.errors import IncompatibleSGLangError, RetrievalError
from rag_radix_frontend.retrieved_text import PlacedDocument, documents_in

if TYPE_CHECKING:
    from rag_radix_frontend.speculation import Speculation

StockStreamExecutor: TypeAlias = StreamExecutor


class ComputedText(SglSelect, ABC):
    """An expression that appends a text computed when its turn comes, and names it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, choices=[], temperature=0.0, choices_method=None)

    @abstractmethod
    def compute(self, executor: RagStreamExecutor) -> str:
        """The text; called on the state's thread."""


def own_params(sampling_params: Any) -> Any:
    """Sampling parameters whose stop strings SGLang may extend in place, as it does."""
    own = copy.copy(sampling_params)
    if isinstance(own.stop, list):
        own.stop = list(own.stop)
    return own


class RagStreamExecutor(StreamExecutor):
    """A stream executor that computes texts and hands its failure to the program.

    Attributes:
        failure: What ended the program, if it has failed.
        on_submit: Called after the program has appended something, on the program's thread.
        kept: The speculation that may be the answer to the next request; the backend takes it.
        shared: The documents that a fork has begun with and a request has counted, until it asks
            for something itself; the backend takes them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Set before the base class starts the thread. Reentrant, since garbage collection may
        # call end() in the middle of submit().
        self._failing = threading.RLock()
        self.failure: Exception | None = None
        self.on_submit: Callable[[], None] | None = None
        self.kept: Speculation | None = None
        self.shared: tuple[PlacedDocument, ...] | None = None
        # What is left of the lists being executed, outermost first.
        self._rests: list[deque[Any]] = []
        super().__init__(*args, **kwargs)

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def submit(self, expr: Any) -> None:
        # The thread empties its queue once, after it failed. Under the lock, an expression is
        # either queued before that or refused, never left in a queue that nobody reads.
        with self._failing:
            self.raise_failure()
            super().submit(expr)
        # Read once: the state's thread may take it away.
        if (on_submit := self.on_submit) is not None:
            on_submit()

    def following(self) -> Iterator[Any]:
        """What comes after the expression being executed, up to where the program is now."""
        for rest in reversed(self._rests):
            yield from tuple(rest)
        if not self.use_thread:
            return
        with self.queue.mutex:
            queued = tuple(self.queue.queue)
        for expr in queued:
            if expr is None:  # the program's end
                return
            yield expr

    def end(self) -> None:
        with self._failing:
            if self.failure is None:
                super().end()
            else:
                self.backend.end_program(self)
        # With a thread, the end comes when that has executed what is queued.
        if not self.use_thread:
            self._drop_kept()

    def get_var(self, name: str) -> Any:
        try:
            return super().get_var(name)
        except KeyError:
            self.raise_failure()
            raise

    def fork(
        self, size: int = 1, position_ids_offset: list[int] | None = None
    ) -> list[RagStreamExecutor]:
        # SGLang has a text computed once before its forks share it, but asks whether there is
        # any before it waits for what was appended.
        self.sync()
        forks: list[RagStreamExecutor] = super().fork(size, position_ids_offset)
        if self.failure is not None:
            for executor in forks:
                executor.end()
            raise self.failure
        if size > 1 and self.text_:
            for executor in forks:
                executor.shared = documents_in(self.text_)
        return forks

    def error(self) -> Exception | None:
        self.sync()
        return self.failure

    def _execute(self, other: Any) -> None:
        try:
            if isinstance(other, SglExprList):
                self._execute_list(other)
            else:
                super()._execute(other)
        except Exception as error:
            self._fail(error)
            raise

    def _execute_list(self, exprs: SglExprList) -> None:
        rest = deque(exprs.expr_list)
        self._rests.append(rest)
        try:
            while rest:
                self._execute(rest.popleft())
        finally:
            self._rests.pop()

    def _fail(self, error: Exception) -> None:
        with self._failing:
            if self.failure is not None:
                return
            self.failure = error
            # Half a generated text is no value; the wake-up call that follows finds nothing.
            for name, event in self.variable_event.items():
                if not event.is_set():
                    self.variables.pop(name, None)

    def _execute_select(self, expr: Any) -> None:
        if not isinstance(expr, ComputedText):
            super()._execute_select(expr)
            return
        text = self._compute(expr)
        self._execute_fill(text)
        self.variables[expr.name] = text
        self.variable_event[expr.name].set()
        if self.stream:
            self.stream_var_event[expr.name].set()

    def _compute(self, expr: ComputedText) -> str:
        try:
            return expr.compute(self)
        except Exception:
            raise
        except BaseException as error:
            # As asyncio.CancelledError is. SGLang's thread would end without a word and the
            # program wait for ever; without a thread it is the program's own affair.
            if not self.use_thread:
                raise
            raise RetrievalError(f"{expr!r} ended with {error!r}") from error

    def _resolve_sampling_params(self, sampling_params: Any) -> Any:
        return super()._resolve_sampling_params(own_params(sampling_params))

    def _drop_kept(self) -> None:
        if self.kept is not None:
            self.kept.discard()
            self.kept = None

    def _thread_worker_func(self) -> None:
        super()._thread_worker_func()
        self._drop_kept()
        # The base class wakes readers of the stream before it marks the end; one that looked
        # in between would wait for ever.
        if self.stream_text_event:
            self.stream_text_event.set()


class RagProgramState(ProgramState):
    """A program state whose readers get the failure instead of an incomplete text."""

    def text(self) -> str:
        text: str = super().text()
        self.stream_executor.raise_failure()
        return text

    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = super().messages()
        self.stream_executor.raise_failure()
        return messages

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        shown = 0
        self._let_pass()
        try:
            for piece in super().text_iter(var_name):
                shown += len(piece)
                yield piece
        except KeyError:
            self._raise_if_incomplete(var_name)
            raise
        if rest := self._rest(var_name, shown):
            yield rest
        self._raise_if_incomplete(var_name)

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        shown = 0
        # A whole text has none.
        with_meta_data = return_meta_data and var_name is not None
        self._let_pass()
        try:
            async for item in super().text_async_iter(var_name, return_meta_data):
                if with_meta_data and item == "":  # the program has ended
                    continue
                shown += len(item[0] if isinstance(item, tuple) else item)
                yield item
        except KeyError:
            self._raise_if_incomplete(var_name)
            raise
        if rest := self._rest(var_name, shown):
            yield (rest, self.stream_executor.meta_info[var_name]) if with_meta_data else rest
        self._raise_if_incomplete(var_name)

    # SGLang's iterators end when the text is complete, whether or not they have shown all of it: a
    # reader that is slower than the program, or comes after its end, misses the last part or all.
    def _rest(self, var_name: str | None, shown: int) -> str:
        executor = self.stream_executor
        text: str = executor.text_ if var_name is None else executor.variables.get(var_name, "")
        return text[shown:] if executor.stream else ""

    def _let_pass(self) -> None:
        # Once read to its end, the text has no event to wait for.
        if self.stream_executor.stream and self.stream_executor.is_finished:
            self.stream_executor.stream_text_event.set()

    def _raise_if_incomplete(self, var_name: str | None) -> None:
        if var_name is None or var_name not in self.stream_executor.variables:
            self.stream_executor.raise_failure()

    def __repr__(self) -> str:
        return f"ProgramState({self.stream_executor.text()!r})"


class RagProgramStateGroup(ProgramStateGroup):
    """A group of forks whose join raises the failure of one of them."""

    def join(self, mode: str = "gather_variable") -> None:
        super().join(mode)
        for state in self.states:
            state.stream_executor.raise_failure()


_REPLACEMENTS = (RagStreamExecutor, RagProgramState, RagProgramStateGroup)

# What the subclasses override or call and `run_ahead` calls, with its parameters.
_USED: dict[type, dict[str, tuple[str, ...]]] = {
    StreamExecutor: {
        "__init__": (
            "self",
            "backend",
            "arguments",
            "default_sampling_para",
            "chat_template",
            "stream",
            "num_api_spec_tokens",
            "use_thread",
        ),
        "submit": ("self", "expr"),
        "end": ("self",),
        "sync": ("self",),
        "get_var": ("self", "name"),
        "fork": ("self", "size", "position_ids_offset"),
        "error": ("self",),
        "text": ("self",),
        "_execute": ("self", "other"),
        "_execute_select": ("self", "expr"),
        "_execute_fill": ("self", "value", "prefix"),
        "_thread_worker_func": ("self",),
        "_init_var_event": ("self", "expr"),
        "_resolve_sampling_params": ("self", "sampling_params"),
    },
    ProgramState: {
        "text": ("self",),
        "messages": ("self",),
        "text_iter": ("self", "var_name"),
        "text_async_iter": ("self", "var_name", "return_meta_data"),
    },
    ProgramStateGroup: {"join": ("self", "mode")},
    SglSelect: {"__init__": ("self", "name", "choices", "temperature", "choices_method")},
}


def check_surface() -> None:
    """Compare SGLang's language with what this module relies on.

    Raises:
        IncompatibleSGLangError: names the first method that is missing or different.
    """
    for owner, methods in _USED.items():
        for name, parameters in methods.items():
            method = getattr(owner, name, None)
            found = tuple(inspect.signature(method).parameters) if method else None
            if found != parameters:
                raise IncompatibleSGLangError(
                    f"SGLang's {owner.__name__}.{name} takes {found}, expected {parameters}; "
                    "install the SGLang version that rag-radix asks for"
                )


def _install() -> None:
    check_surface()
    for replacement in _REPLACEMENTS:
        setattr(interpreter, replacement.__mro__[1].__name__, replacement)


_install()
