"""Documents outlive their server, on a tiny model of random weights."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from e2e.cpu_server import running_server
from e2e.exactness import ask, assert_intact, make_prompts
from e2e.tiny_model import make_tiny_llama, make_tiny_mla

pytestmark = [pytest.mark.server, pytest.mark.slow]

PAGE = 16
FLAGS = ["--dtype", "float32", "--max-total-tokens", "2048", "--page-size", str(PAGE)]
FLAGS += ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
FLAGS += ["--hicache-ratio", "4", "--hicache-storage-backend", "file"]
FLAGS += ["--hicache-storage-prefetch-policy", "wait_complete"]
FLAGS += ["--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE})]
DEADLINE_S = 60.0
# Every call into the tree is compared between the ranks, and a difference ends the server.
TWO_RANKS = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
}


def flags(directory, **settings):
    """Files in `directory`; every document is written after its prefill, and read again when it
    is asked for."""
    config = json.dumps({"store_after": 1, "preload_host_share": 0, **settings})
    storage = ["--file-storage-path", str(directory)]
    return [*FLAGS, *storage, "--radix-eviction-policy-config", config]


def storage(server):
    return server.get("/rag/stats")["storage"]


def wait_until_written(server):
    """Until the files are the same for a while."""
    deadline, last = time.monotonic() + DEADLINE_S, None
    while (now := storage(server)["written_pages"]) != last:
        assert time.monotonic() < deadline
        last = now
        time.sleep(1)
    assert now > 0


def from_storage(server, prompt):
    """Its answer, and how many of its tokens came from storage."""
    reply = server.generate(**prompt.body())
    details = reply["meta_info"]["cached_tokens_details"] or {}
    return tuple(reply["output_ids"]), details.get("storage", 0)


def end(server, signum):
    """As a container's stop does, or a crash."""
    if signum == signal.SIGKILL:
        os.killpg(server.pid, signum)
    else:
        os.kill(server.pid, signum)
    deadline = time.monotonic() + DEADLINE_S
    while server.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def assert_questions_hit_storage(server, prompts, answers):
    read = 0
    for prompt, expected in zip(prompts, answers, strict=True):
        answer, tokens = from_storage(server, prompt)
        assert answer == expected
        read += tokens
    assert read > 0
    assert_intact(server)
    return read


def cold_answers(server, prompts):
    answers = [ask(server, prompt).tokens for prompt in prompts]
    assert len(set(answers)) > len(prompts) // 2
    return answers


@pytest.mark.parametrize("make_model", [make_tiny_llama, make_tiny_mla])
def test_the_same_questions_hit_storage_after_a_stop_and_after_a_crash(tmp_path, make_model):
    model, files = make_model(tmp_path / "model"), tmp_path / "files"
    prompts = make_prompts(12, page_size=PAGE, chunk_tokens=128)
    with running_server(model, *flags(files)) as server:
        answers = cold_answers(server, prompts)
        wait_until_written(server)
        end(server, signal.SIGKILL)
    with running_server(model, *flags(files)) as server:
        assert_questions_hit_storage(server, prompts, answers)
        end(server, signal.SIGTERM)
        assert "Traceback" not in server.log()
    with running_server(model, *flags(files)) as server:
        assert_questions_hit_storage(server, prompts, answers)
        known = {d["id"]: d for d in server.get("/rag/documents")["documents"]}
        assert max(document["frequency"] for document in known.values()) > 2


def test_what_was_invalidated_or_damaged_is_computed_anew_by_the_next_server(tmp_path):
    model, files = make_tiny_llama(tmp_path / "model"), tmp_path / "files"
    prompts = make_prompts(12, page_size=PAGE, chunk_tokens=128)
    first = prompts[0].documents[0][0]
    ends = {name: end for prompt in prompts for name, _, end in prompt.documents[:1]}
    with running_server(model, *flags(files)) as server:
        answers = cold_answers(server, prompts)
        wait_until_written(server)
        assert server.post("/rag/invalidate", {"id": first})["places"] > 0
        end(server, signal.SIGKILL)
    with running_server(model, *flags(files)) as server:
        for prompt, expected in zip(prompts, answers, strict=True):
            answer, tokens = from_storage(server, prompt)
            assert answer == expected
            if prompt.documents[0][0] == first:
                assert tokens < ends[first]
        assert storage(server)["read_pages"] > 0
        wait_until_written(server)
        end(server, signal.SIGKILL)
    for path in files.glob("*/*/*.kv"):
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)
    (path.parent / "foreign.kv").write_bytes(b"something else")
    with running_server(model, *flags(files)) as server:
        for prompt, expected in zip(prompts, answers, strict=True):
            assert from_storage(server, prompt)[0] == expected
        assert storage(server)["damaged_files"] > 1
        assert "foreign.kv is skipped" in server.log()
        assert_intact(server)


def test_two_servers_with_one_directory_have_each_others_documents(tmp_path):
    model, files = make_tiny_llama(tmp_path / "model"), tmp_path / "files"
    prompts = make_prompts(12, page_size=PAGE, chunk_tokens=128)
    with running_server(model, *flags(files)) as one, running_server(model, *flags(files)) as other:
        answers = [ask(one, prompt).tokens for prompt in prompts[:6]]
        answers += [ask(other, prompt).tokens for prompt in prompts[6:]]
        wait_until_written(one)
        wait_until_written(other)
        assert_questions_hit_storage(one, prompts, answers)
        assert_questions_hit_storage(other, prompts, answers)


def test_two_ranks_read_and_invalidate_alike(tmp_path):
    model, files = make_tiny_llama(tmp_path / "model"), tmp_path / "files"
    prompts = make_prompts(12, page_size=PAGE, chunk_tokens=128)
    env = TWO_RANKS
    first = prompts[0].documents[0][0]
    with running_server(model, *flags(files), "--tp-size", "2", env=env) as server:
        answers = cold_answers(server, prompts)
        wait_until_written(server)
        end(server, signal.SIGTERM)
    assert len({path.parent.name for path in files.glob("*/*/*.kv")}) == 2
    victim = sorted(files.glob("*/rank-1-of-2/*.kv"))[3]
    victim.write_bytes(victim.read_bytes()[:-1])  # one rank lacks what the other has
    with running_server(model, *flags(files), "--tp-size", "2", env=env) as server:
        assert_questions_hit_storage(server, prompts, answers)
        server.post("/rag/invalidate", {"id": first})
        for prompt, expected in zip(prompts, answers, strict=True):
            assert from_storage(server, prompt)[0] == expected
        assert_intact(server)


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_crash_documents_are_on_host_before_the_first_question(tmp_path, ranks):
    model, files = make_tiny_llama(tmp_path / "model"), tmp_path / "files"
    prompts = make_prompts(12, page_size=PAGE, chunk_tokens=128)
    settings, env = [*flags(files, preload_host_share=1), "--tp-size", str(ranks)], {}
    if ranks == 2:
        env = TWO_RANKS
    with running_server(model, *settings, env=env) as server:
        answers = cold_answers(server, prompts)
        wait_until_written(server)
        end(server, signal.SIGKILL)
    with running_server(model, *settings, env=env) as server:
        deadline = time.monotonic() + DEADLINE_S
        while (preloaded := storage(server)["preloaded"])["state"] == "running":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert preloaded["state"] == "done"
        assert "are on host again (done)" in server.log()
        host = server.get("/rag/stats")["host"]
        assert host["cached_tokens"] >= preloaded["tokens"] > 0
        for prompt, expected in zip(prompts, answers, strict=True):
            reply = server.generate(**prompt.body())
            details = reply["meta_info"]["cached_tokens_details"] or {}
            assert tuple(reply["output_ids"]) == expected
            assert details.get("storage", 0) == 0
            if prompt is prompts[0]:
                assert details["host"] > 0
        assert_intact(server)


def test_a_directory_that_cannot_be_used_costs_only_the_hits(tmp_path):
    model, files = make_tiny_llama(tmp_path / "model"), tmp_path / "files"
    files.write_text("a file where a directory should be")
    prompts = make_prompts(6, page_size=PAGE, chunk_tokens=128)
    with running_server(model, *flags(files)) as server:
        answers = cold_answers(server, prompts)
        assert [ask(server, prompt).tokens for prompt in prompts] == answers
        assert server.log().count("can't be used") == 1
        assert server.log().count("can't be written") == 0
        assert_intact(server)
