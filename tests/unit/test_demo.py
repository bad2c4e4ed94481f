"""The demo's command line, its server's process group, and what it prints."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
main = importlib.import_module("demo_main")
report = importlib.import_module("demo_report")
server_module = importlib.import_module("demo_server")


def make_server(tmp_path: Path, script: str) -> Any:
    """A server object around a shell script, in a process group of its own."""
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", script], stdout=output, stderr=output, start_new_session=True
        )
    return server_module.Server(process=process, url="http://127.0.0.1:9", log=log)


def is_running(pid: int) -> bool:
    try:
        # Not its command line, which is empty while a process changes into another program.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_for_line(path: Path) -> str:
    while "\n" not in path.read_text():
        time.sleep(0.02)
    return path.read_text().split("\n")[0]


@pytest.mark.parametrize("leader", ["wait", "trap '' TERM; wait; wait", "exit 3"])
def test_stop_ends_every_process_of_the_group(
    tmp_path: Path, leader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STOP_LIMIT_S", 0.5)
    # The child ignores the polite signal, whatever the leader does.
    server = make_server(tmp_path, f"(trap '' TERM; sleep 600) & echo $!; {leader}")
    child = int(wait_for_line(server.log))
    assert is_running(child)
    server.stop()
    assert server.process.poll() is not None
    deadline_s = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not is_running(child)


def test_a_server_that_ends_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = make_server(tmp_path, "echo out of luck; exit 7")
    with pytest.raises(server_module.ServerError, match=r"status 7[\s\S]*out of luck"):
        server.wait_ready()
    server.stop()


def test_two_demos_started_together_get_different_ports() -> None:
    # Neither server has bound its port by the time the other one's is chosen.
    ports = {server_module.free_port() for _ in range(5)}
    assert len(ports) > 1
    for port in ports:
        with socket.socket() as probe:
            probe.bind((server_module.HOST, port))


def test_sigterm_unwinds_with_the_status_of_the_signal() -> None:
    with pytest.raises(SystemExit) as caught:
        main.leave(15, None)
    assert caught.value.code == 143


def test_one_question_replaces_the_ten() -> None:
    assert tuple(main.questions(main.parse_options([]))) == main.QUESTIONS
    assert list(main.questions(main.parse_options(["--question", "Why?"]))) == ["Why?"]


def test_a_chat_asks_until_an_empty_line_or_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["What?", "Who?", "", "never asked"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    chat = main.parse_options(["--chat", "--question", "Why?"])
    assert list(main.questions(chat)) == ["Why?", "What?", "Who?"]

    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert list(main.questions(main.parse_options(["--chat"]))) == []


def make_answer(device: int = 100, host: int = 50, prompt: int = 200) -> Any:
    return report.Answer(
        question="What does a very long question about the assert statement look like in a table?",
        documents=(report.Retrieved("topics/assert#0", 0.68), report.Retrieved("topics/if#0", 0.4)),
        text="It checks.\nThen it goes on. " * 9,
        finished=False,
        ttft_s=0.25,
        device_tokens=device,
        host_tokens=host,
        prompt_tokens=prompt,
    )


def test_computed_tokens_are_those_no_tier_had() -> None:
    assert make_answer().computed_tokens == 50


@pytest.mark.parametrize("columns", [80, 100])
def test_output_fits_the_terminal_and_has_no_colour_codes_in_a_pipe(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "COLUMNS", str(columns))
    report.show_answer(1, make_answer())
    report.show_summary([make_answer(), make_answer(0, 0)])
    printed = capsys.readouterr().out
    assert "\033" not in printed
    assert max(len(line) for line in printed.splitlines()) <= columns


@pytest.mark.parametrize("device", [0, 1, 199, 200])
def test_the_bar_always_has_the_same_length(device: int) -> None:
    assert len(report.bar(make_answer(device, 0))) == report.BAR_CELLS


def test_the_summary_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    report.show_summary([make_answer(100, 50, 200), make_answer(0, 0, 200)])
    total = next(line for line in capsys.readouterr().out.splitlines() if "mean TTFT" in line)
    assert total.split()[-4:] == ["100", "50", "250", "38%"]


def test_the_gain_is_shown_only_where_there_is_something_to_compare(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report.show_summary([make_answer(), make_answer()])
    assert "Median" not in capsys.readouterr().out
    report.show_summary([make_answer(), make_answer(0, 0)])
    assert "Median" in capsys.readouterr().out
