"""A server of one's own for the length of a measurement."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rag_radix.errors import LaunchError

HOST = "127.0.0.1"
START_LIMIT_S = 900.0
STOP_LIMIT_S = 15.0
LOG_TAIL_LINES = 25


@contextmanager
def serving(
    model_path: str,
    flags: Sequence[str],
    *,
    program: str = "rag-radix",
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[str]:
    """Serve a model with `rag-radix serve` and these flags until the block ends.

    Args:
        model_path: For `--model-path`.
        flags: More flags.
        program: "sglang" serves with `sglang serve`, to which no flags are added.
        environment: Variables to set besides the present ones.
        log: Where the server's output goes; by default it is gone when the block ends.

    Yields:
        The server's URL.

    Raises:
        LaunchError: The server ended, or wasn't ready in time.
    """
    port = _free_port()
    command = [str(Path(sys.executable).with_name(program)), "serve"]
    command += ["--model-path", model_path, "--host", HOST, "--port", str(port)]
    command += flags
    with _log_file(log) as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with exiting_on_termination():
            try:
                _wait_until_ready(process, port, Path(output.name))
                yield f"http://{HOST}:{port}"
            finally:
                _stop(process)


@contextmanager
def exiting_on_termination() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, which runs the clean-up that the signal would skip."""
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _log_file(path: Path | None) -> IO[bytes]:
    if path is None:
        return tempfile.NamedTemporaryFile(prefix="rag-radix-serve-", suffix=".log")
    return path.open("wb")


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        if process.poll() is not None:
            problem = f"ended with status {process.returncode}"
        elif time.monotonic() > deadline_s:
            problem = f"wasn't ready after {START_LIMIT_S:.0f} s"
        else:
            try:
                urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.3)
                continue
        with log.open(errors="replace") as lines:
            tail = "".join(deque(lines, LOG_TAIL_LINES))
        raise LaunchError(f"the server {problem}; its log ends with:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server with everything it started: its process group, politely, then for certain."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
