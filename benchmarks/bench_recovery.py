#!/usr/bin/env python3
"""How fast the hit rate is back after the scheduler process was killed under load.

A supervised server (`rag-radix serve --restarts`) of each arm is warmed up, its scheduler is killed
while clients ask, and the time is taken until the hit rate over a window of requests is 90% of the
one before. Both arms have the same tiers, and the same files where there is a storage backend.

    python benchmarks/bench_recovery.py --model-path MODEL [--json] [--storage none] [--arms ...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from document_load import Corpus, Load, hit_rate

RECOVERED = 0.9
ARMS = {
    "knowledge-tree": ["--radix-cache-backend", "knowledge-tree"],
    "stock-hicache": [],
}
_START_LIMIT_S = 600.0
_STOP_LIMIT_S = 30.0
_PAGE = 16


def main() -> None:
    """Measure, and print a table or, with `--json`, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--storage", choices=("file", "none"), default="file")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--document-tokens", type=int, default=256)
    parser.add_argument("--device-tokens", type=int, default=4096)
    parser.add_argument("--host-ratio", type=float, default=4.0, help="host by device tier")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=600, help="requests before the kill")
    parser.add_argument("--window", type=int, default=60, help="requests of a hit rate")
    parser.add_argument("--patience", type=int, default=1500, help="requests after the kill")
    parser.add_argument("--kills", type=int, default=1, help="of each arm's server, in turn")
    parser.add_argument("--log-folder", type=Path, help="where servers' output is kept")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("flags", nargs="*", help="more flags for all servers, behind --")
    options = parser.parse_args()
    arms = {arm: _measure(arm, options) for arm in options.arms}
    print(_table(arms))
    if options.json:
        settings = {**vars(options), "log_folder": str(options.log_folder)}
        result = {
            "recovered_at": RECOVERED,
            "arms": arms,
            "settings": settings,
            "python": platform.python_version(),
            "sglang": version("sglang"),
            "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        }
        print(json.dumps(result))


def _measure(arm: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    corpus = Corpus(options.documents, options.document_tokens)
    with _supervised(arm, options) as (url, process):
        load = Load(url, corpus.bodies(seed=1), options.clients)
        try:
            return [_kill_once(load, url, process, options) for _ in range(options.kills)]
        finally:
            load.end()


def _kill_once(
    load: Load, url: str, process: subprocess.Popen[bytes], options: argparse.Namespace
) -> dict[str, Any]:
    before = load.wait_for(len(load.served) + options.warm_up)
    old = hit_rate(before[-options.window :])
    killed_s = time.monotonic()
    _scheduler(process.pid).kill()
    answered = len(load.served)
    # A request that was being answered just then may still be.
    up_s = load.wait_for(answered + options.clients + 1)[-1].at_s - killed_s
    recovered: dict[str, Any] = {"requests": None, "seconds": None, "of_answering_s": None}
    rates = []
    for count in range(options.window, options.patience + 1):
        after = load.wait_for(answered + count)[answered : answered + count]
        rates.append(hit_rate(after[-options.window :]))
        if rates[-1] >= RECOVERED * old:
            seconds = after[-1].at_s - killed_s
            recovered = {"requests": count, "seconds": seconds, "of_answering_s": seconds - up_s}
            break
    return {
        "preloaded": _preloaded(url),
        "hit_rate_before": old,
        "first_answers_after_s": up_s,
        "recovered_after": recovered,
        "hit_rate_of_first_window": rates[0],
        "hit_rate_of_last_window": rates[-1],
    }


def _preloaded(url: str) -> dict[str, Any] | None:
    """What the knowledge tree has loaded from files by itself since it was started again."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/rag/stats", timeout=60) as reply:
        storage: dict[str, Any] = json.load(reply)["storage"] or {}
        return storage.get("preloaded")
    return None


@contextmanager
def _supervised(
    arm: str, options: argparse.Namespace
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
        port = _free_port()
        flags = ["--model-path", options.model_path, "--port", str(port), *ARMS[arm]]
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", str(options.host_ratio)]
        flags += ["--max-total-tokens", str(options.device_tokens), "--page-size", str(_PAGE)]
        if options.storage == "file":
            extra = json.dumps({"prefetch_threshold": _PAGE})
            flags += ["--hicache-storage-backend", "file", "--file-storage-path", folder]
            flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
            flags += ["--hicache-storage-backend-extra-config", extra]
        command = [str(Path(sys.executable).with_name("sglang")), "serve", *flags, *options.flags]
        # The supervisor of `rag-radix serve --restarts`, for either arm.
        program = (
            "import sys; from rag_radix.supervisor import Supervisor; sys.exit("
            f"Supervisor({command!r}, {options.kills}, ('127.0.0.1', {port})).run())"
        )
        log = Path(folder, "server.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", program], stdout=output, stderr=output, cwd=folder
            )
        try:
            _wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}", process
        finally:
            _stop(process)
            if options.log_folder is not None:
                options.log_folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, options.log_folder / f"{arm}.log")


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=10).close()
            return
        time.sleep(0.3)
    raise SystemExit(f"the server wasn't healthy:\n{log.read_text(errors='replace')[-4000:]}")


def _scheduler(pid: int) -> psutil.Process:
    return next(
        process
        for process in psutil.Process(pid).children(recursive=True)
        if "scheduler" in " ".join(process.cmdline())
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_LIMIT_S)
        for left in [*tree, psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                left.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _table(arms: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["arm              hit rate  first answers  90% back after  later by    requests"]
    for arm, kills in arms.items():
        for kill in kills:
            back = kill["recovered_after"]
            seconds, later = (
                "never" if back[key] is None else f"{back[key]:.1f} s"
                for key in ("seconds", "of_answering_s")
            )
            lines.append(
                f"{arm:16} {kill['hit_rate_before']:8.1%} {kill['first_answers_after_s']:12.1f} s"
                f" {seconds:>15} {later:>9} {back['requests']!s:>11}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(psutil.cpu_count()))
    main()
