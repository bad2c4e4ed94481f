"""A server that is started again when it dies."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# A server that lived for so long has proved that it can, so its restarts are counted anew.
PROVED_S = 600.0

_USAGE_STATUS = 2
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


class Supervisor:
    """Runs a command as a child process, and again when it dies unexpectedly.

    It isn't run again after it was told to end, after it has ended with status 0 or 2 (wrong
    usage), and when it has never been up: then its options are wrong, or its machine. It has a
    session of its own, so a terminal's signals reach it once, by way of this process, and it is
    told to end when this process is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        restarts: int,
        address: tuple[str, int] | None,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """
        Args:
            command: What to run.
            restarts: How many in a row, at most.
            address: Host and port that accept connections once the server is up; None when that
                isn't known, and then it counts as being up from the beginning.
            first_pause_s: Before the first restart; doubled for each further one in a row.
        """
        self._command = list(command)
        self._restarts = restarts
        self._address = address
        self._first_pause_s = first_pause_s
        self._was_up = address is None
        self._told_to_end = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Returns the exit status of the last child, 128 and the signal if one has ended it."""
        in_a_row = 0
        with self._passing_signals_on():
            while True:
                started_s = time.monotonic()
                status = self._run_child()
                lived_s = time.monotonic() - started_s
                if self._told_to_end or status in (0, _USAGE_STATUS):
                    return _shell_status(status)
                if lived_s > PROVED_S:
                    in_a_row = 0
                how = f"the server ended with {_describe(status)} after {lived_s:.0f} s"
                if not self._was_up:
                    _say(f"{how}, before it was up; not restarted")
                    return _shell_status(status)
                if in_a_row == self._restarts:
                    _say(f"{how}; given up after {in_a_row} restarts in a row")
                    return _shell_status(status)
                pause_s = min(self._first_pause_s * 2.0 ** min(in_a_row, 60), LONGEST_PAUSE_S)
                in_a_row += 1
                _say(f"{how}; restart {in_a_row} of {self._restarts} in {pause_s:.1f} s")
                self._sleep(pause_s)
                if self._told_to_end:
                    return _shell_status(status)

    def _run_child(self) -> int:
        """Run the child to its end; its return code as `subprocess` has it."""
        child = subprocess.Popen(self._command, start_new_session=True, preexec_fn=_end_with_parent)
        self._child = child
        if self._told_to_end:  # while it was being started
            child.terminate()
        try:
            while child.poll() is None and not self._was_up:
                self._was_up = _accepts(self._address)
                time.sleep(_POLL_S)
            return child.wait()
        finally:
            self._child = None
            # What it has left behind holds its port or its memory.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, _: object) -> None:
        self._told_to_end |= number in _ENDING
        if self._child is not None:
            self._child.send_signal(number)

    def _sleep(self, pause_s: float) -> None:
        # An event that a signal's handler sets might be locked just then.
        until_s = time.monotonic() + pause_s
        while not self._told_to_end and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))


def _end_with_parent() -> None:
    """In the child: have the system tell it to end when its parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _accepts(address: tuple[str, int] | None) -> bool:
    assert address is not None
    try:
        socket.create_connection(address, timeout=_POLL_S).close()
    except OSError:
        return False
    return True


def _describe(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    return f"signal {-status} ({signal.Signals(-status).name})"


def _shell_status(status: int) -> int:
    return status if status >= 0 else 128 - status


def _say(what: str) -> None:
    print(f"rag-radix: {what}", file=sys.stderr, flush=True)
