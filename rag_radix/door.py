"""Where annotated requests enter SGLang: the hooks, and nothing else.

All hooks go through SGLang's `HookRegistry`. A few small ones are registered in each process that
can own a tokenizer; they see which radix cache was selected, and only when it is the knowledge
tree are the others added. Requests without an annotation pass untouched, if their `input_ids` are
tokens that the model has.

Ways in, and where each is checked before anything runs:

- `Engine`, `/v1/completions`, gRPC: `TokenizerManager.generate_request`, which all of them call
  where an error still becomes a proper answer.
- `/generate`: `serve_generate_request`, because a stream has sent its status 200 by the time it
  calls `generate_request`.
- `/v1/chat/completions`: the conversion of the chat to a native request.
- Aborts: one that comes before its request has left for the schedulers is sent again behind it.
- Extra HTTP workers (`--tokenizer-worker-num`): SGLang loads no plugins there, so they are given
  an app that does (`rag_radix.http_app`).

Front ends that leave out SGLang's Python tokenizer manager can't be checked, `check_front_end`
refuses them.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from rag_radix import wire
from rag_radix.admission import admit, counters
from rag_radix.chat import ChatPlacement, current
from rag_radix.control import warming
from rag_radix.errors import (
    AnnotationError,
    IncompatibleSGLangError,
    PromptError,
    UnsupportedError,
)
from rag_radix.http_routes import Call, add_routes
from rag_radix.names import BACKEND
from rag_radix.settings import check_settings
from rag_radix.sglang_compat import abort_dispatched
from rag_radix.vocabulary import check_token_ids

__all__ = ["TARGETS", "check_front_end", "counters", "install", "is_applied", "selected", "verify"]

WORKER_APP = "rag_radix.http_app:app"
WORKER_APP_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"

_MANAGER = "sglang.srt.managers.tokenizer_manager"
_HTTP = "sglang.srt.entrypoints.http_server"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"

# Every name of SGLang's that this package hooks on the request's way in, and before there is one.
TARGETS = {
    "generate": f"{_MANAGER}.TokenizerManager.generate_request",
    "dispatched": f"{_MANAGER}.TokenizerManager._mark_state_dispatched",
    "arguments": "sglang.srt.server_args.ServerArgs.check_server_args",
    "manager_ready": f"{_MANAGER}.TokenizerManager.init_request_dispatcher",
    "workers": "sglang.srt.managers.multi_tokenizer_mixin.MultiTokenizerRouter.__init__",
    "native_http": f"{_HTTP}.serve_generate_request",
    "chat": f"{_CHAT}._convert_to_internal_request",
    "chat_conversation": f"{_CHAT}._apply_conversation_template",
    "chat_encode": f"{_CHAT.rpartition('.')[0]}.parallel_prompt_encode",
}

_installed: dict[str, Callable[..., Any]] = {}


def selected(server_args: Any) -> bool:
    """Whether a server with these arguments uses the knowledge tree."""
    return bool(server_args.radix_cache_backend == BACKEND)


def install() -> None:
    """Register the hooks of this process; called from the plugin's `register`."""
    # A process that is no server's main process and hasn't loaded the tokenizer manager never
    # will: don't make schedulers import it.
    if multiprocessing.parent_process() is None or _MANAGER in sys.modules:
        _register("generate", _before_generate, "before")
        _register("dispatched", _after_dispatched, "after")
        _register("manager_ready", _after_manager_ready, "after")
        _register("workers", _before_workers, "before")
        _register("arguments", _before_arguments, "before")


def verify() -> None:
    """Check that every hook that was registered is in its place.

    Raises:
        IncompatibleSGLangError: SGLang logged a failure to apply one, and went on.
    """
    for name, hook in _installed.items():
        if not is_applied(TARGETS[name], hook):
            raise IncompatibleSGLangError(
                f"The hook on {TARGETS[name]} isn't in place; the log says why. This release of "
                "rag-radix needs SGLang 0.5.23, and no other plugin may hook that name first"
            )


def is_applied(target: str, hook: Callable[..., Any]) -> bool:
    """Whether calls of `target` go through `hook`."""
    function = pkgutil.resolve_name(target)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def check_front_end(server_args: Any) -> None:
    """Refuse front ends in which annotations would go unchecked.

    Raises:
        UnsupportedError: Naming the front end and the remedy.
    """
    from sglang.srt.environ import envs

    if envs.SGLANG_RUST_SERVER.get():
        raise UnsupportedError(
            "SGLANG_RUST_SERVER replaces the Python front end that reads document annotations: "
            f"unset it, or drop --radix-cache-backend {BACKEND}"
        )
    if server_args.smg_grpc_mode or server_args.grpc_mode:
        raise UnsupportedError(
            "--smg-grpc-mode replaces the Python front end that reads document annotations: use "
            f"--grpc-port instead, or drop --radix-cache-backend {BACKEND}"
        )


def _register(name: str, hook: Callable[..., Any], kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    if name not in _installed:
        source = HookSource(plugin_name="rag_radix", dist_name="rag-radix")
        HookRegistry.register(TARGETS[name], hook, HookType(kind), source=source)
        _installed[name] = hook


def _after_manager_ready(_result: None, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """The first moment a process knows its configuration: add the rest, or nothing."""
    if not selected(manager.server_args):
        return
    from rag_radix import rpc

    caller = rpc.Caller(manager)
    if _HTTP in sys.modules and "native_http" not in _installed:
        _install_http(caller.call, manager.server_args)
    verify()


def _install_http(call: Call, server_args: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    _register("native_http", _around_native_http, "around")
    _register("chat", _around_chat, "around")
    _register("chat_conversation", _after_chat_conversation, "after")
    _register("chat_encode", _around_chat_encode, "around")
    HookRegistry.apply_hooks()
    add_routes(sys.modules[_HTTP].app, _http_manager, call)
    if server_args.tokenizer_worker_num == 1:  # else `_before_workers` sees to it, once for all
        warming.at_start(server_args)


def _http_manager() -> Any:
    """The tokenizer manager that the HTTP server of this process uses."""
    return sys.modules[_HTTP].get_global_state().tokenizer_manager


def _before_arguments(server_args: Any) -> None:
    """Refuse wrong settings before processes are started and a model is loaded."""
    if selected(server_args):
        check_settings(server_args)


def _before_workers(_router: Any, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    if not selected(server_args):
        return
    from sglang.srt.environ import envs

    app = envs.SGLANG_HTTP_SERVER_APP_PATH.get()
    if app not in (WORKER_APP, f"{_HTTP}:app"):
        raise UnsupportedError(
            f"{WORKER_APP_VARIABLE}={app} takes the place of the app that reads document "
            "annotations in the HTTP workers: unset it, or use --tokenizer-worker-num 1"
        )
    os.environ[WORKER_APP_VARIABLE] = WORKER_APP
    verify()
    if _HTTP in sys.modules:
        warming.at_start(server_args)


def _before_generate(manager: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not selected(manager.server_args) or not isinstance(request, GenerateReqInput):
        return
    check_token_ids(request.input_ids, manager.model_config.vocab_size)
    if _counting_refusals(admit, request, manager):
        counters.add(annotated_requests=1)


def _after_dispatched(_result: None, manager: Any, rid: str) -> None:
    """SGLang sends an abort once, and the schedulers ignore one whose request they don't know."""
    if selected(manager.server_args):
        abort_dispatched(manager, rid)


async def _around_native_http(original: Callable[..., Any], obj: Any, request: Any) -> Any:
    manager = _http_manager()
    if selected(manager.server_args):
        try:
            check_token_ids(obj.input_ids, manager.model_config.vocab_size)
            _counting_refusals(admit, obj, manager)
        except (AnnotationError, PromptError) as error:
            from fastapi.responses import JSONResponse

            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
    return await original(obj, request)


def _around_chat(
    original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None
) -> Any:
    manager = serving.tokenizer_manager
    raw = (
        _counting_refusals(wire.parse, request.custom_params)
        if selected(manager.server_args)
        else None
    )
    if raw is None:
        return original(serving, request, raw_request)
    placement = _counting_refusals(ChatPlacement, raw)
    # A multimodal model caches what it rendered, for requests without an annotation too.
    if manager.model_config.is_multimodal:
        adapted = original(serving, request, raw_request)
    else:
        with placement.here():
            adapted = original(serving, request, raw_request)
    _counting_refusals(placement.settle, adapted[0])
    return adapted


def _after_chat_conversation(result: Any, serving: Any, _request: Any, is_multimodal: bool) -> None:
    placement = current()
    if placement is not None and not is_multimodal:
        ids = placement.encode(serving.tokenizer_manager.tokenizer, result.prompt)
        if ids is not None:
            result.prompt_ids = ids


def _around_chat_encode(
    original: Callable[..., Any], tokenizer: Any, text: Any, encode_kwargs: Any = None
) -> Any:
    placement = current()
    if placement is not None and isinstance(text, str):
        special = (encode_kwargs or {}).get("add_special_tokens", True)
        ids = placement.encode(tokenizer, text, add_special_tokens=special)
        if ids is not None:
            return ids
    return original(tokenizer, text, encode_kwargs)


def _counting_refusals(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except AnnotationError:
        counters.add(refused_requests=1)
        raise
