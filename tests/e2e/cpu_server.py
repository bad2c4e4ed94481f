"""A real SGLang server as a context manager, for tests and benchmarks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
LOG_TAIL_CHARS = 6000


class ServerError(RuntimeError):
    """The server didn't start, or died; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: Without a trailing slash.
        pid: Of the main process, which leads its own process group.
        log_path: Output of the server and all of its processes.
        start_s: Time from launch until the server was healthy.
    """

    url: str
    pid: int
    log_path: Path
    start_s: float

    def generate(self, *, timeout_s: float = 300.0, **body: Any) -> Any:
        """`POST /generate`; raises `urllib.error.HTTPError` on a status of 400 and above."""
        return self.post("/generate", body, timeout_s=timeout_s)

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = 300.0) -> Any:
        """Post JSON; the reply parsed as JSON where it is JSON, else as text."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return _read(request, timeout_s)

    def get(self, path: str, *, timeout_s: float = 60.0) -> Any:
        """The reply parsed as JSON where it is JSON, else as text."""
        return _read(urllib.request.Request(self.url + path), timeout_s)

    def flush_cache(self) -> None:
        """Empty the radix cache; fails while requests are running."""
        self.post("/flush_cache", {})

    def log(self) -> str:
        """Everything the server has written so far."""
        return self.log_path.read_text(errors="replace")

    def is_alive(self) -> bool:
        """Whether the main process still runs."""
        return psutil.pid_exists(self.pid) and (
            psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        )


@contextmanager
def running_server(
    model: str | Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    program: str = "sglang",
) -> Iterator[Server]:
    """Serve `model` with `sglang serve` until the block ends.

    The server runs in a temporary folder, so that nothing is importable from the checkout by
    accident, and in its own process group. On exit every process it started is ended, also when
    this process is told to terminate.

    Args:
        model: Model directory.
        flags: More flags for `sglang serve`.
        env: Environment variables to set besides the present ones.
        program: "rag-radix" serves with `rag-radix serve`.

    Raises:
        ServerError: The server ended or wasn't healthy in time.
    """
    port = _free_port()
    executable = Path(sys.executable).with_name(program)
    command = [str(executable), "serve", "--model-path", str(Path(model).resolve())]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags]
    with tempfile.TemporaryDirectory(prefix="sglang-server-") as folder:
        log_path = Path(folder, "server.log")
        started = time.monotonic()
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            with _termination_as_exit():
                url = f"http://127.0.0.1:{port}"
                _wait_until_healthy(process, url, log_path, command)
                yield Server(url, process.pid, log_path, time.monotonic() - started)
        finally:
            _end_tree(process)


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit`, which runs the clean-up that the signal would skip."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, log_path: Path, command: Sequence[str]
) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if process.poll() is not None:
            problem = f"ended with exit status {process.returncode} before it was healthy"
        elif time.monotonic() > deadline:
            problem = f"wasn't healthy after {START_TIMEOUT_S:.0f} s"
        else:
            try:
                urllib.request.urlopen(url + "/health", timeout=10).close()
                return
            except OSError:
                time.sleep(0.2)
                continue
        tail = log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:]
        raise ServerError(f"{' '.join(command)}\n{problem}; its log ends with:\n{tail}")


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process with everything it started, also what outlived its parent."""
    try:
        tree = [psutil.Process(process.pid)]
        tree += tree[0].children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    # Processes whose parent has died are no one's children, but still in the group.
    tree += [p for p in psutil.process_iter() if p not in tree and _group(p) == process.pid]
    for member in tree:
        _signal(member, signal.SIGTERM)
    # Told to end, it would first look for requests, which it does every five seconds.
    process.kill()
    _, alive = psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)
    for member in alive:
        _signal(member, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)
    process.wait(timeout=STOP_TIMEOUT_S)


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def _signal(process: psutil.Process, signum: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def _read(request: urllib.request.Request, timeout_s: float) -> Any:
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        text = reply.read().decode()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
