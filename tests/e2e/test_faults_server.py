"""Faults on a server of two ranks, most on one of them only: right answers, and the same tree on
both."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import psutil
import pytest
from e2e.cpu_server import Server, ServerError, running_server
from e2e.exactness import Prompt, ask, ask_all, assert_intact, make_prompts, stream
from e2e.plugins import environment_with
from e2e.tiny_model import make_tiny_llama

pytestmark = [pytest.mark.server, pytest.mark.slow]

PAGE = 16
FLAGS = ["--dtype", "float32", "--max-total-tokens", "2048", "--page-size", str(PAGE)]
FLAGS += ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
FLAGS += ["--hicache-ratio", "2", "--tp-size", "2"]
STORAGE = ["--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy"]
STORAGE += ["wait_complete", "--hicache-storage-backend-extra-config"]
STORAGE += [json.dumps({"prefetch_threshold": PAGE}), "--radix-eviction-policy-config"]
STORAGE += [json.dumps({"store_after": 1, "preload_host_share": 0})]
# Every call into the tree is compared between the ranks, and a difference ends the server.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
DEADLINE_S = 60.0

# The fault of the moment and its rank, "all" for every process, are read from a file.
PLUGIN = """
import errno, os, time
from pathlib import Path

FAULT, STORAGE = {fault!r}, {storage!r}

def fault_here():
    import torch
    with open(FAULT) as file:
        fault, rank = file.read().split()
    at_work = torch.distributed.is_initialized()
    return fault if rank == "all" or at_work and torch.distributed.get_rank() == int(rank) else ""

def storage_fails():
    real_open, real_unlink, real_replace = Path.open, Path.unlink, Path.replace
    real_truncate = os.truncate

    def fault_of(path):
        return fault_here() if str(path).startswith(STORAGE) else ""

    def open_(path, mode="r", *args, **kwargs):
        fault, writes = fault_of(path), "w" in mode
        if fault == "slow":
            time.sleep(0.1)
        for name, of_writes, code in (
            ("full", True, errno.ENOSPC), ("read-only", True, errno.EROFS),
            ("read-only-directory", True, errno.EACCES), ("unreadable", False, errno.EIO),
        ):
            if (fault, writes) == (name, of_writes):
                raise OSError(code, os.strerror(code), str(path))
        return real_open(path, mode, *args, **kwargs)

    def unlink(path, *args, **kwargs):
        if fault_of(path).startswith("read-only"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real_unlink(path, *args, **kwargs)

    def truncate(path, length):
        if fault_of(path) == "read-only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real_truncate(path, length)

    def replace(path, target):
        if fault_of(path) == "corrupt":
            whole = bytearray(path.read_bytes())
            whole[-1] ^= 1
            path.write_bytes(whole)
        return real_replace(path, target)

    Path.open, Path.unlink, Path.replace = open_, unlink, replace
    os.truncate = truncate

def host_is_full():
    from sglang.srt.managers.cache_controller import HiCacheController

    allocate = HiCacheController.alloc_prefetch_host_buffers

    def allocate_or_not(*args):
        return None if fault_here() == "host-full" else allocate(*args)

    HiCacheController.alloc_prefetch_host_buffers = allocate_or_not

def no_host_memory():
    from sglang.srt.mem_cache.pool_host import mha

    start = mha.MHATokenToKVPoolHost.init_kv_buffer

    def start_or_not(pool):
        if fault_here() == "no-host-memory":
            raise MemoryError("there is no memory for this")
        return start(pool)

    mha.MHATokenToKVPoolHost.init_kv_buffer = start_or_not

def clock_jumps():
    now, day_s = time.time, 86400

    def jumping():
        return now() + {{"tomorrow": day_s, "yesterday": -day_s}}.get(fault_here(), 0)

    time.time = jumping

def register():
    storage_fails()
    host_is_full()
    no_host_memory()
    clock_jumps()
"""


@dataclass(frozen=True)
class Faulty:
    """A server into which faults are put, and what it is asked.

    Attributes:
        fault: File that names the fault of the moment and its rank.
        files: Storage.
        expected: The answers to `prompts` before any fault.
    """

    server: Server
    fault: Path
    files: Path
    prompts: list[Prompt]
    expected: list[tuple[int, ...]]

    def set(self, fault: str, rank: int | str = "all") -> None:
        inject(self.fault, fault, rank)

    def ask_everything(self, *, concurrency: int) -> int:
        """Returns the tokens found in storage."""
        order = random.Random(concurrency).sample(range(len(self.prompts)), len(self.prompts))
        asked = [self.prompts[i] for i in order]
        answers = ask_all(self.server, asked, concurrency=concurrency)
        assert [answer.tokens for answer in answers] == [self.expected[i] for i in order]
        return sum(answer.storage_hit for answer in answers)

    def flush(self) -> None:
        """Empty both tiers as soon as all is written that is to be; storage stays."""
        self.server.post(f"/flush_cache?timeout={DEADLINE_S:g}", {})


def inject(file: Path, fault: str, rank: int | str) -> None:
    new = file.with_suffix(".new")
    new.write_text(f"{fault} {rank}")
    new.replace(file)  # is read at any time


def environment(folder: Path, files: Path) -> tuple[Path, dict[str, str]]:
    """The file that names the fault, none yet, and the environment of a server that reads it."""
    fault = folder / "fault"
    plugin = PLUGIN.format(fault=str(fault), storage=str(files))
    env = environment_with(plugin, folder / "plugin") | TWO_RANKS
    inject(fault, "none", "all")
    return fault, env


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    model, files = make_tiny_llama(folder / "model"), folder / "files"
    fault, env = environment(folder, files)
    prompts = make_prompts(12, page_size=PAGE, chunk_tokens=128)
    flags = [*FLAGS, *STORAGE, "--file-storage-path", str(files)]
    with running_server(model, *flags, env=env) as server:
        expected = [answer.tokens for answer in ask_all(server, prompts, concurrency=1)]
        assert len(set(expected)) > len(prompts) // 2
        yield Faulty(server, fault, files, prompts, expected)


@pytest.fixture(autouse=True)
def healthy(request: pytest.FixtureRequest) -> None:
    """No fault, and nothing cached or stored."""
    if "faulty" in request.fixturenames:
        faulty: Faulty = request.getfixturevalue("faulty")
        faulty.set("none")
        faulty.server.post("/rag/invalidate", {"all": True})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["full", "read-only", "slow", "unreadable", "corrupt"])
def test_storage_that_fails_on_one_rank_costs_hits_and_nothing_else(
    faulty: Faulty, fault: str, rank: int
) -> None:
    faulty.set(fault, rank)
    for concurrency in (1, 4):
        faulty.ask_everything(concurrency=concurrency)
        faulty.flush()
    found = faulty.ask_everything(concurrency=4)
    assert found > 0 or fault != "slow"
    assert "is damaged" in faulty.server.log() or fault != "corrupt"
    assert found == 0 or fault in ("slow", "corrupt")  # files may be right at their beginning
    assert_intact(faulty.server)
    first = faulty.prompts[0].documents[0][0]
    assert faulty.server.post("/rag/invalidate", {"id": first})["places"] > 0
    faulty.set("none")
    faulty.server.post("/rag/invalidate", {"all": True})
    faulty.ask_everything(concurrency=4)
    faulty.flush()
    assert faulty.ask_everything(concurrency=1) > 0
    assert_intact(faulty.server)


def stored_of(faulty: Faulty, document: str) -> int:
    """The most tokens that prompts which begin with `document` find in storage."""
    most = 0
    for prompt, expected in zip(faulty.prompts, faulty.expected, strict=True):
        if prompt.documents[0][0] == document:
            answer = ask(faulty.server, prompt)
            assert answer.tokens == expected
            most = max(most, answer.storage_hit)
    return most


def wait_until_stored(server: Server) -> None:
    """Until nothing more is written: a flush is refused while something is."""
    server.post(f"/flush_cache?timeout={DEADLINE_S:g}", {})


@pytest.mark.parametrize("rank", [0, 1, "all"])
def test_what_a_read_only_disk_keeps_is_an_error_and_never_found_again(
    faulty: Faulty, rank: int | str
) -> None:
    document, _, end = faulty.prompts[0].documents[0]
    faulty.ask_everything(concurrency=1)
    faulty.flush()
    assert stored_of(faulty, document) >= end // PAGE * PAGE
    faulty.set("read-only", rank)
    with pytest.raises(urllib.error.HTTPError) as error:
        faulty.server.post("/rag/invalidate", {"id": document})
    reply = json.loads(error.value.read())
    assert (error.value.code, reply["removed"]["places"] > 0) == (500, True)
    storage = reply["removed"]["storage"]
    assert storage["left_files"] > 0
    assert f"{storage['left_files']} files in {faulty.files}" in reply["error"]["message"]
    faulty.flush()
    assert stored_of(faulty, document) < end // PAGE * PAGE
    faulty.set("none")
    assert faulty.server.post("/rag/invalidate", {"id": document})["storage"]["left_files"] == 0
    faulty.flush()
    assert stored_of(faulty, document) < end // PAGE * PAGE
    assert_intact(faulty.server)


def test_what_went_from_a_read_only_directory_is_not_found_by_the_next_server(
    tmp_path: Path,
) -> None:
    model, files = make_tiny_llama(tmp_path / "model"), tmp_path / "files"
    fault, env = environment(tmp_path, files)
    flags = [*FLAGS, *STORAGE, "--file-storage-path", str(files)]
    prompts = make_prompts(12, page_size=PAGE, chunk_tokens=128)
    gone, kept = list(dict.fromkeys(prompt.documents[0] for prompt in prompts))[:2]
    with running_server(model, *flags, env=env) as server:
        expected = [answer.tokens for answer in ask_all(server, prompts, concurrency=1)]
        wait_until_stored(server)
        inject(fault, "read-only-directory", "all")
        storage = server.post("/rag/invalidate", {"id": gone[0]})["storage"]
        assert (storage["files"] > 0, storage["left_files"]) == (True, 0)
        inject(fault, "read-only", "all")
        with pytest.raises(urllib.error.HTTPError, match="500"):
            server.post("/rag/invalidate", {"id": kept[0]})
        main = psutil.Process(server.pid)
        os.killpg(server.pid, signal.SIGKILL)
        main.wait(DEADLINE_S)
    # What was told to be left is found, and nothing else of the two.
    with running_server(model, *flags, env=env) as server:
        faulty = Faulty(server, fault, files, prompts, expected)
        assert stored_of(faulty, gone[0]) < gone[2] // PAGE * PAGE
        assert stored_of(faulty, kept[0]) >= kept[2] // PAGE * PAGE
        with pytest.raises(urllib.error.HTTPError, match="500"):
            server.post("/rag/invalidate", {"id": kept[0]})
        inject(fault, "none", "all")
        main = psutil.Process(server.pid)
        main.terminate()  # the last try comes at the stop
        main.wait(DEADLINE_S)
    with running_server(model, *flags, env=env) as server:
        faulty = Faulty(server, fault, files, prompts, expected)
        for name, _, end in (gone, kept):
            assert stored_of(faulty, name) < end // PAGE * PAGE
        assert faulty.ask_everything(concurrency=1) > 0
        assert_intact(server)


def test_what_a_full_host_has_no_room_for_is_computed(faulty: Faulty) -> None:
    faulty.ask_everything(concurrency=1)
    faulty.flush()
    faulty.set("host-full")
    for concurrency in (1, 4):
        assert faulty.ask_everything(concurrency=concurrency) == 0
        faulty.flush()
    faulty.set("none")
    assert faulty.ask_everything(concurrency=4) > 0
    assert_intact(faulty.server)


@pytest.mark.parametrize("rank", [0, 1, "all"])
def test_clocks_that_jump_by_a_day_change_nothing(faulty: Faulty, rank: int | str) -> None:
    faulty.ask_everything(concurrency=1)
    pin = {"id": faulty.prompts[0].documents[0][0], "tier": "host", "ttl_s": 1800}
    faulty.server.post("/rag/pin", pin)
    done, today = threading.Event(), date.today()

    def jump() -> None:
        while not done.is_set():
            for when in ("tomorrow", "yesterday", "none"):
                faulty.set(when, rank)
                done.wait(0.2)

    jumps = threading.Thread(target=jump)
    jumps.start()
    try:
        faulty.flush()
        for concurrency in (1, 4, 1):
            assert faulty.ask_everything(concurrency=concurrency) > 0
            faulty.flush()
    finally:
        done.set()
        jumps.join()
    for days in (-1, 1) if rank == "all" else ():
        assert f"[{today + timedelta(days)} " in faulty.server.log()
    (kept,) = faulty.server.get("/rag/pins")["pins"]
    assert kept["id"] == pin["id"]
    faulty.server.post("/rag/unpin", {"id": pin["id"]})
    assert_intact(faulty.server)


def test_a_server_ends_when_told_to_under_load_and_with_slow_storage(faulty: Faulty) -> None:
    faulty.set("slow", 1)
    body = faulty.prompts[0].body(output_tokens=300)
    *_, whole = stream(faulty.server, body)
    outcomes: list[object] = []
    begun = threading.Semaphore(0)

    def client() -> None:
        events = []
        for event in stream(faulty.server, body):
            events.append(event)
            begun.release()
        outcomes.append(events[-1]["output_ids"])

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    main = psutil.Process(faulty.server.pid)
    everything = [main, *main.children(recursive=True)]
    said = len(faulty.server.log())
    os.kill(faulty.server.pid, signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert outcomes == [whole["output_ids"]] * len(threads)
    assert main.wait(DEADLINE_S) == 0
    assert not psutil.wait_procs(everything, timeout=DEADLINE_S)[1]
    assert "Traceback" not in faulty.server.log()[said:]


def test_a_server_without_memory_for_its_host_tier_on_one_rank_says_so_and_ends(
    tmp_path: Path,
) -> None:
    fault, env = environment(tmp_path, tmp_path / "files")
    inject(fault, "no-host-memory", 1)
    model = make_tiny_llama(tmp_path / "model")
    with (
        pytest.raises(ServerError, match=r"ended with exit status [^0]") as error,
        running_server(model, *FLAGS, env=env),
    ):
        pass
    assert "there is no memory for this" in str(error.value)
