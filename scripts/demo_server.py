"""Starts the model server as a process group of its own, and ends all of that group."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

HOST = "127.0.0.1"
START_LIMIT_S = 300.0
STOP_LIMIT_S = 15.0
DYING_LIMIT_S = 2.0
LOG_TAIL_LINES = 25


class ServerError(Exception):
    """The server didn't start or stopped answering; the message has the end of its log."""


@dataclass(frozen=True)
class Server:
    """A running server; `pid` is also the id of its process group."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @classmethod
    def start(cls, flags: Sequence[str], log: Path) -> Self:
        """Start `rag-radix serve` with `flags` on a free port; returns before it is ready."""
        port = free_port()
        command = [str(Path(sys.executable).parent / "rag-radix"), "serve", *flags]
        command += ["--host", HOST, "--port", str(port)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                start_new_session=True,
            )
        return cls(process=process, url=f"http://{HOST}:{port}", log=log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> None:
        """Return once the server answers; raise `ServerError` if it ends or takes too long."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s:
            status = self.process.poll()
            if status is not None:
                raise ServerError(f"the server ended with status {status}\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise ServerError(f"the server wasn't ready in {START_LIMIT_S:.0f} s\n{self.log_tail()}")

    def has_ended(self) -> bool:
        """Whether the server is gone, for one whose connection just broke: it may be dying."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DYING_LIMIT_S)
        return self.process.returncode is not None

    def stats(self) -> dict[str, Any]:
        """What the knowledge tree reports about itself."""
        with urllib.request.urlopen(f"{self.url}/rag/stats", timeout=10) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def log_tail(self) -> str:
        with self.log.open(errors="replace") as lines:
            tail = "".join(deque(lines, LOG_TAIL_LINES))
        return f"end of {self.log}:\n{tail}"

    def stop(self) -> None:
        """End the whole process group: politely, then for certain."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_LIMIT_S)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def free_port() -> int:
    """A port the system picks at random.

    Not the first free one of a range: the server binds it only after its imports, and two
    demos started together would choose the same and one would ask the other's server.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
