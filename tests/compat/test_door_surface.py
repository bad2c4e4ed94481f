"""What the door relies on in SGLang; each test fails when that changes."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fresh import Fresh

from rag_radix import door
from rag_radix.errors import ControlError, UnsupportedError
from rag_radix.sglang_compat import abort_dispatched

PARAMETERS = {
    "arguments": ["self"],
    "generate": ["self", "obj", "request"],
    "dispatched": ["self", "rid"],
    "manager_ready": ["self"],
    "workers": ["self", "server_args", "port_args"],
    "native_http": ["obj", "request"],
    "chat": ["self", "request", "raw_request"],
    "chat_conversation": ["self", "request", "is_multimodal"],
    "chat_encode": ["tokenizer", "text", "encode_kwargs"],
}


@pytest.mark.parametrize("name", door.TARGETS)
def test_hooked_functions_take_what_the_hooks_take(name: str) -> None:
    function = pkgutil.resolve_name(door.TARGETS[name])
    assert list(inspect.signature(function).parameters) == PARAMETERS[name]


def test_requests_have_the_fields_that_admission_reads() -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    names = {field.name for field in dataclasses.fields(GenerateReqInput)}
    assert {"text", "input_ids", "sampling_params", "session_params"} <= names
    assert callable(GenerateReqInput.contains_mm_input)


def test_server_arguments_have_the_fields_that_the_gates_read() -> None:
    from sglang.srt.server_args import ServerArgs

    names = inspect.signature(ServerArgs).parameters.keys()
    assert {"radix_cache_backend", "smg_grpc_mode", "grpc_mode", "tokenizer_worker_num"} <= names


def test_extra_http_workers_import_the_app_that_the_variable_names() -> None:
    from sglang.srt.environ import envs

    assert envs.SGLANG_HTTP_SERVER_APP_PATH.name == door.WORKER_APP_VARIABLE
    assert envs.SGLANG_HTTP_SERVER_APP_PATH.get() == "sglang.srt.entrypoints.http_server:app"
    assert isinstance(envs.SGLANG_RUST_SERVER.get(), bool)


def test_the_manager_has_what_admission_reads() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    source = inspect.getsource(TokenizerManager)
    for name in ("tokenizer", "context_len", "max_req_input_len", "allow_auto_truncate"):
        assert f"self.{name} = " in source


@pytest.mark.parametrize("is_early", [True, False])
def test_sglang_sends_an_abort_once_and_we_send_an_early_one_again(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

    sent: list[AbortReq] = []
    monkeypatch.setattr(
        TokenizerManager, "_dispatch_to_scheduler", lambda self, req: sent.append(req)
    )
    manager = object.__new__(TokenizerManager)
    manager.enable_metrics = False
    state = ReqState([], False, None, None, None)
    manager.rid_to_state = {"known": state}

    def dispatch() -> None:
        manager._mark_state_dispatched("known")
        assert state.dispatched
        abort_dispatched(manager, "known")

    if is_early:
        manager.abort_request("known")
        dispatch()
    else:
        dispatch()
        manager.abort_request("known")
    manager.abort_request("known")
    assert [req.rid for req in sent] == ["known"] * (2 if is_early else 1)
    abort_dispatched(manager, "unknown")


def test_a_request_counts_as_dispatched_once_it_has_left_for_the_schedulers() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    for name in ("_send_one_request", "_send_batch_request"):
        source = inspect.getsource(getattr(TokenizerManager, name))
        left, marked = (
            source.find("_dispatch_to_scheduler("),
            source.find("_mark_state_dispatched("),
        )
        assert 0 < left < marked


START = """
from types import SimpleNamespace
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.utils import TypeBasedDispatcher
from rag_radix import door
import sglang.srt.entrypoints.http_server as http_server
door.install()
door.install()
HookRegistry.apply_hooks()
def paths():
    return [getattr(route, "path", None) for route in http_server.app.routes]
def ready(backend):
    manager = SimpleNamespace(
        server_args=SimpleNamespace(
            radix_cache_backend=backend,
            radix_eviction_policy_config=None,
            tokenizer_worker_num=1,
        )
    )
    manager._result_dispatcher = TypeBasedDispatcher([])
    door._after_manager_ready(None, manager)
"""


def test_all_hooks_are_applied_once_the_knowledge_tree_is_selected(fresh: Fresh) -> None:
    fresh.run(
        START
        + """
door.verify()
ready("knowledge-tree")
assert door.TARGETS.keys() == door._installed.keys()
assert {"/rag/stats", "/rag/promote", "/rag/pool"} <= set(paths())
"""
    )


def test_without_the_knowledge_tree_the_http_server_stays_as_it_is(fresh: Fresh) -> None:
    fresh.run(
        START
        + """
import pkgutil
before = {t: pkgutil.resolve_name(t) for t in door.TARGETS.values()}
routes = paths()
ready(None)
assert {t: pkgutil.resolve_name(t) for t in door.TARGETS.values()} == before
assert paths() == routes
assert not hasattr(pkgutil.resolve_name(door.TARGETS["native_http"]), "__wrapped__")
"""
    )


def test_a_hook_that_could_not_be_applied_stops_the_start(fresh: Fresh) -> None:
    fresh.run(
        START
        + """
from rag_radix.errors import IncompatibleSGLangError
HookRegistry._patched.add(door.TARGETS["chat"])
try:
    ready("knowledge-tree")
except IncompatibleSGLangError as error:
    assert door.TARGETS["chat"] in str(error)
else:
    raise AssertionError("the missing hook went unnoticed")
"""
    )


def test_a_scheduler_does_not_import_the_tokenizer_manager_for_the_door(fresh: Fresh) -> None:
    fresh.run(
        """
import multiprocessing, sys
names = ["sglang.srt.managers.tokenizer_manager", "sglang.srt.entrypoints.http_server"]
for name in names:
    package, _, module = name.rpartition(".")
    delattr(sys.modules[package], module)
    del sys.modules[name]
multiprocessing.parent_process = lambda: object()
from rag_radix import door
door.install()
assert not door._installed
assert not set(names) & set(sys.modules)
"""
    )


@pytest.fixture
def no_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no app; what it names afterwards is forgotten."""
    monkeypatch.setenv(door.WORKER_APP_VARIABLE, "")
    monkeypatch.delenv(door.WORKER_APP_VARIABLE)


def start_workers(backend: str | None, **config: Any) -> None:
    args = SimpleNamespace(radix_cache_backend=backend, radix_eviction_policy_config=config)
    door._before_workers(None, args, None)


@pytest.mark.usefixtures("no_app")
def test_extra_http_workers_are_given_the_app_that_loads_plugins() -> None:
    start_workers(None)
    assert door.WORKER_APP_VARIABLE not in os.environ
    for _ in range(2):
        start_workers("knowledge-tree")
        assert os.environ[door.WORKER_APP_VARIABLE] == "rag_radix.http_app:app"


@pytest.mark.usefixtures("no_app")
def test_the_process_that_starts_the_workers_has_documents_warmed(tmp_path: Path) -> None:
    import sglang.srt.entrypoints.http_server  # noqa: F401

    path = tmp_path / "warm.json"
    path.write_text("{}")
    with pytest.raises(ControlError, match='"documents" must be an array'):
        start_workers("knowledge-tree", warm=str(path))


def test_a_server_calls_itself_as_its_certificate_wants_it() -> None:
    from sglang.srt.arg_groups.serving_hook import ssl_verify_of

    def asked(certificate: str | None, authorities: str | None) -> Any:
        return ssl_verify_of(SimpleNamespace(ssl_certfile=certificate, ssl_ca_certs=authorities))

    assert asked(None, None) is True
    assert asked("server.pem", None) is False
    assert asked("server.pem", "ca.pem") == "ca.pem"


def test_an_app_of_the_users_own_is_refused_for_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(door.WORKER_APP_VARIABLE, "mine:app")
    with pytest.raises(UnsupportedError, match="mine:app"):
        start_workers("knowledge-tree")


def test_front_ends_without_the_python_tokenizer_manager_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(**modes: bool) -> None:
        args = {"smg_grpc_mode": False, "grpc_mode": False, **modes}
        door.check_front_end(SimpleNamespace(**args))

    check()
    for mode in ("smg_grpc_mode", "grpc_mode"):
        with pytest.raises(UnsupportedError, match="--smg-grpc-mode"):
            check(**{mode: True})
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(UnsupportedError, match="SGLANG_RUST_SERVER"):
        check()
