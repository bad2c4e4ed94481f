"""Programs in processes of their own that have imported SGLang and applied no hook of ours.

Hooks stay in a process once applied, and SGLang takes ten seconds to import: so one process
imports it, and is forked for each program.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FORKS = """
import json, os, sys, traceback
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.managers import scheduler, tokenizer_manager
for line in sys.stdin:
    program, output = json.loads(line)
    child = os.fork()
    if child == 0:
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = 1
        try:
            exec(program, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Fresh:
    """Runs programs, each in a fork of `process`."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self._process = process
        self._output = output

    def run(self, program: str) -> str:
        """What `program` writes; AssertionError with it where it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([program, str(self._output)]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # an import may have said something before
            if line.startswith("ended "):
                break
        else:
            raise AssertionError(f"no SGLang: exit status {self._process.wait()}")
        written = self._output.read_text()
        assert line == "ended 0\n", written[-4000:]
        return written


@contextmanager
def fresh_processes(folder: Path) -> Iterator[Fresh]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Fresh(process, folder / "output")
        finally:
            process.kill()
