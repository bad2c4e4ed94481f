"""What users of SGLang combine with a cache, on a server with the knowledge tree."""

from __future__ import annotations

import json

import pytest
from e2e.exactness import Prompt, ask, assert_intact, make_prompts, stats, stream

from rag_radix.cli import main
from rag_radix.cost_model import PrefillCostTable

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return make_prompts(12, page_size=16, chunk_tokens=128)


def test_one_line_in_the_log_names_tree_policy_and_tiers(server):
    (line,) = [line for line in server.log().splitlines() if "Knowledge tree:" in line]
    cost = "prefill cost from the model's shape"
    for part in ("KnowledgeTree", "Pgdsf", cost, "device 2,048 tokens (1 MiB)", "host", "page 1"):
        assert part in line


def test_a_stream_ends_with_the_text_of_a_plain_answer(server, prompts):
    plain = ask(server, prompts[0])
    *_, last = stream(server, prompts[0].body())
    assert tuple(last["output_ids"]) == plain.tokens


def test_parallel_samples_count_as_one_retrieval(server, prompts):
    before = stats(server)["requests"]
    body = prompts[1].body()
    body["sampling_params"]["n"] = 3
    replies = server.generate(**body)
    assert len(replies) == 3
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 1
    after = stats(server)["requests"]
    assert after["requests"] - before["requests"] == 1
    assert after["documents"] - before["documents"] == len(prompts[1].documents)


def test_structured_output_is_valid_and_the_same_when_cached(server, prompts):
    body = prompts[2].body(output_tokens=40)
    # Of a JSON schema, a model of random weights writes blanks without end.
    regex = r'\{"ok": (true|false), "n": [0-9]\}'
    body["sampling_params"] |= {"regex": regex, "ignore_eos": False}
    server.flush_cache()
    cold, warm = server.generate(**body), server.generate(**body)
    assert set(json.loads(cold["text"])) == {"ok", "n"}
    assert warm["text"] == cold["text"]
    assert warm["meta_info"]["cached_tokens"] > 0


def test_a_batch_in_one_request_is_answered_like_its_parts(server, prompts):
    alone = [ask(server, prompt).tokens for prompt in prompts[3:7]]
    bodies = [prompt.body() for prompt in prompts[3:7]]
    replies = server.generate(
        input_ids=[body["input_ids"] for body in bodies],
        sampling_params=[body["sampling_params"] for body in bodies],
    )
    assert [tuple(reply["output_ids"]) for reply in replies] == alone


def test_a_flush_forgets_documents_and_sets_the_clocks_back(server, prompts):
    for prompt in prompts:
        ask(server, prompt)
    assert stats(server)["device"]["clock"] > 0
    server.flush_cache()
    report = assert_intact(server)
    assert report["known_documents"] == report["nodes"] == 0
    assert report["device"]["clock"] == report["host"]["clock"] == 0
    assert report["device"]["cached_tokens"] == report["host"]["cached_tokens"] == 0


def test_a_document_goes_to_host_once_and_comes_back_from_there(server, prompts):
    server.flush_cache()
    before = stats(server)
    for _ in range(2):
        for prompt in prompts:
            ask(server, prompt)
    report = assert_intact(server)
    swap = report["swap"]
    assert swap["in_tokens"] > before["swap"]["in_tokens"]
    assert swap["most_copies_of_a_node"] == 1
    copied = swap["out_tokens"] - before["swap"]["out_tokens"]
    dropped = report["host"]["evicted_tokens"] - before["host"]["evicted_tokens"]
    assert copied == report["host"]["cached_tokens"] + dropped


def test_a_profile_finds_its_prefixes_on_device_and_on_host(server, tmp_path):
    output = tmp_path / "profile.json"
    arguments = ["--url", server.url, "-o", str(output), "--max-tokens", "256", "--repeats", "1"]
    assert main(["profile", *arguments]) == 0
    profile = json.loads(output.read_text())
    model = server.get("/server_info")["model_path"]
    assert (profile["model"], profile["attention_backend"]) == (model, "rag_prefix")
    assert profile["hits"]["host_problem"] is None
    assert all(profile["hits"]["host_s"])
    assert PrefillCostTable.load(output).new_tokens[-1] == 256
    assert assert_intact(server)["nodes"] == 0
