"""`rag-radix serve`: SGLang's own launcher with our defaults filled in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rag_radix.errors import ConfigError
from rag_radix.names import BACKEND
from rag_radix.supervisor import Supervisor

_RESTARTS = "--restarts"
_HELP = f"""rag-radix serve adds one option to SGLang's own:
  {_RESTARTS} N  run the server as a child process and start it again when it dies, at most N times
                in a row
"""


def with_defaults(arguments: Sequence[str], *, cuda: bool) -> list[str]:
    """Add the flags that choose the knowledge tree and its host tier, unless given.

    Args:
        arguments: Flags of `sglang serve`.
        cuda: Whether a CUDA device is there; its prefix attention is FlashInfer.

    Raises:
        ConfigError: Another radix-cache backend is asked for.
    """
    completed = list(arguments)
    backend = _value(arguments, "--radix-cache-backend")
    if backend is None:
        completed += ["--radix-cache-backend", BACKEND]
    elif backend != BACKEND:
        raise ConfigError(
            f"--radix-cache-backend {backend}: `rag-radix serve` is for {BACKEND}; "
            "use `sglang serve` for another cache"
        )
    if not _given(arguments, "--enable-hierarchical-cache", "--enable-hicache"):
        completed.append("--enable-hierarchical-cache")
    if cuda and not _given(arguments, "--attention-backend"):
        completed += ["--attention-backend", "flashinfer"]
    return completed


def serve(arguments: Sequence[str]) -> int:
    """Start the server and return its exit status; returns when it has ended.

    With `--restarts N` it runs as a child process, which is started again when it dies.

    Raises:
        ConfigError: An option of ours has a wrong value.
    """
    restarts, arguments = split_restarts(arguments)
    if restarts:
        command = [str(Path(sys.executable).with_name("rag-radix")), "serve", *arguments]
        return Supervisor(command, restarts, address(arguments)).run()
    return _serve_here(arguments)


def split_restarts(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """The value of `--restarts`, 0 without it, and the other arguments.

    Raises:
        ConfigError: It is no number of restarts.
    """
    if not _given(arguments, _RESTARTS):
        return 0, list(arguments)
    value = _value(arguments, _RESTARTS)
    if value is None or not value.isdecimal():
        raise ConfigError(f"{_RESTARTS} {value}: give how often the server may be started again")
    rest = list(arguments)
    at = next(i for i, argument in enumerate(rest) if argument.split("=", 1)[0] == _RESTARTS)
    del rest[at : at + (1 if "=" in rest[at] else 2)]
    return int(value), rest


def address(arguments: Sequence[str]) -> tuple[str, int] | None:
    """Where the server will accept connections; None when a file of options may say that."""
    if _given(arguments, "--config"):
        return None
    host = _value(arguments, "--host") or "127.0.0.1"
    port = _value(arguments, "--port") or "30000"
    # SGLang's parser says what is wrong with another one.
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return (local.get(host, host), int(port)) if port.isdecimal() else None


def _serve_here(arguments: Sequence[str]) -> int:
    import torch
    from sglang.cli.main import main
    from sglang.srt.plugins import load_plugins

    from rag_radix import door

    help_only = _given(arguments, "-h", "--help")
    if help_only:
        print(_HELP)
    completed = (
        list(arguments) if help_only else with_defaults(arguments, cuda=torch.cuda.is_available())
    )
    sys.argv = ["sglang", "serve", *completed]
    load_plugins()  # SGLang does the same, and would go on without what failed
    door.verify()
    main()
    return 0


def _given(arguments: Sequence[str], *flags: str) -> bool:
    return any(argument.split("=", 1)[0] in flags for argument in arguments)


def _value(arguments: Sequence[str], flag: str) -> str | None:
    for position, argument in enumerate(arguments):
        name, separator, value = argument.partition("=")
        if name == flag:
            if separator:
                return value
            return arguments[position + 1] if position + 1 < len(arguments) else ""
    return None
