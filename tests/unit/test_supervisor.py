"""Real child processes, which die as a test has written down."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rag_radix.errors import ConfigError
from rag_radix.serve import address, split_restarts
from rag_radix.supervisor import Supervisor

WAIT_S = 20.0


def run(folder: Path, child: str, restarts: int = 3) -> tuple[int, int]:
    """Supervise a script to its end: its exit status, and how often it was started."""
    return Supervisor(command(folder, child), restarts, None, first_pause_s=0.01).run(), starts(
        folder
    )


def command(folder: Path, child: str) -> list[str]:
    """A script that notes each of its starts, and knows as `starts` how many there were."""
    script = folder / "child.py"
    script.write_text(
        "import os, signal, sys, time\n"
        f"with open({str(folder / 'starts')!r}, 'a') as file: file.write('.')\n"
        f"starts = os.path.getsize({str(folder / 'starts')!r})\n" + textwrap.dedent(child)
    )
    return [sys.executable, "-S", "-E", str(script)]


def starts(folder: Path) -> int:
    return (folder / "starts").stat().st_size if (folder / "starts").exists() else 0


def supervised(folder: Path, child: str, restarts: int = 3) -> subprocess.Popen[str]:
    """The supervisor in a process of its own, to be sent signals."""
    program = (
        "import sys\nfrom rag_radix.supervisor import Supervisor\n"
        f"sys.exit(Supervisor({command(folder, child)!r}, {restarts}, None, "
        "first_pause_s=0.01).run())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_starts(folder: Path, count: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while starts(folder) < count:
        assert time.monotonic() < deadline_s, "the child was never started"
        time.sleep(0.01)


def assert_gone(pid: int) -> None:
    """A process has ended, or will now."""
    deadline_s = time.monotonic() + WAIT_S
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s, "it still runs"
            time.sleep(0.01)


def test_a_child_that_dies_is_started_again_until_it_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = "if starts < 3: os.kill(os.getpid(), signal.SIGKILL)"
    assert run(tmp_path, child) == (0, 3)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" after ")[0] for line in said] == [
        "rag-radix: the server ended with signal 9 (SIGKILL)"
    ] * 2
    assert [line.split("; ")[1] for line in said] == [
        "restart 1 of 3 in 0.0 s",
        "restart 2 of 3 in 0.0 s",
    ]


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("os.abort()", 128 + 6)])
def test_one_that_dies_again_and_again_is_given_up_with_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, status: int
) -> None:
    assert run(tmp_path, end, restarts=2) == (status, 3)
    assert "given up after 2 restarts in a row" in capsys.readouterr().err


def test_restarts_are_counted_anew_after_a_long_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag_radix.supervisor.PROVED_S", 0.0)
    assert run(tmp_path, "sys.exit(1 if starts < 5 else 0)", restarts=1) == (0, 5)


@pytest.mark.parametrize("status", [0, 2])
def test_an_end_that_was_meant_is_the_end(tmp_path: Path, status: int) -> None:
    assert run(tmp_path, f"sys.exit({status})") == (status, 1)


def test_one_that_was_never_up_is_not_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        where = unused.getsockname()
        assert Supervisor(command(tmp_path, "sys.exit(1)"), 3, where, first_pause_s=0.01).run() == 1
        assert starts(tmp_path) == 1
        assert "before it was up" in capsys.readouterr().err
        unused.listen()
        assert Supervisor(command(tmp_path, "sys.exit(1)"), 3, where, first_pause_s=0.01).run() == 1
        assert starts(tmp_path) == 1 + 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("reaction", "status"),
    [("lambda *_: sys.exit(0)", 0), ("lambda *_: sys.exit(7)", 7), ("signal.SIG_DFL", None)],
)
def test_a_signal_to_end_ends_the_child_for_good_and_its_status_is_kept(
    tmp_path: Path, number: signal.Signals, reaction: str, status: int | None
) -> None:
    child = f"signal.signal({int(number)}, {reaction})\nopen({str(tmp_path / 'up')!r}, 'w')\n"
    process = supervised(tmp_path, child + "time.sleep(60)")
    while not (tmp_path / "up").exists():
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == (128 + number if status is None else status)
    assert starts(tmp_path) == 1
    assert said == ""


def test_other_signals_reach_the_child_and_end_nothing(tmp_path: Path) -> None:
    child = f"""
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1 if starts < 2 else 0))
        open({str(tmp_path)!r} + f"/up{{starts}}", "w")
        time.sleep(60)
    """
    process = supervised(tmp_path, child)
    for count in (1, 2):
        while not (tmp_path / f"up{count}").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "ended with status 1" in said


def test_a_signal_to_end_ends_the_pause_too(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom rag_radix.supervisor import Supervisor\n"
        f"sys.exit(Supervisor({command(tmp_path, 'sys.exit(5)')!r}, 3, None, "
        "first_pause_s=60).run())"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "restart 1 of 3" in process.stderr.readline()
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 5
    assert starts(tmp_path) == 1


def test_what_a_dead_child_has_left_behind_is_ended(tmp_path: Path) -> None:
    left = tmp_path / "left"
    child = f"""
        if starts == 1:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
            with open({str(left)!r}, "w") as file: file.write(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(tmp_path, child) == (0, 2)
    assert_gone(int(left.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="the system doesn't tell a child of it")
def test_a_child_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    process = supervised(
        tmp_path,
        f"with open({str(pid_file)!r}, 'w') as file: file.write(str(os.getpid()))\ntime.sleep(60)",
    )
    wait_for_starts(tmp_path, 1)
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert_gone(int(pid_file.read_text()))


def test_the_option_is_taken_out_of_the_servers_arguments() -> None:
    assert split_restarts(["--port", "1"]) == (0, ["--port", "1"])
    assert split_restarts(["--restarts", "5", "--port", "1"]) == (5, ["--port", "1"])
    assert split_restarts(["m", "--restarts=0"]) == (0, ["m"])


@pytest.mark.parametrize("wrong", [["--restarts"], ["--restarts", "-1"], ["--restarts=often"]])
def test_a_wrong_number_of_restarts_is_refused(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match="--restarts"):
        split_restarts(wrong)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("127.0.0.1", 30000)),
        (["--host", "0.0.0.0", "--port=8000"], ("127.0.0.1", 8000)),
        (["--host=::"], ("::1", 30000)),
        (["--port", "many"], None),
        (["--config", "options.yaml"], None),
    ],
)
def test_where_a_server_will_be_up(arguments: list[str], expected: tuple[str, int] | None) -> None:
    assert address(arguments) == expected
