"""A cached document never changes an answer: against stock SGLang with caching off."""

from __future__ import annotations

import functools
import random
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import pytest
from e2e.cpu_server import Server, running_server
from e2e.exactness import (
    BF16_MARGIN,
    MODEL,
    OUTPUT_TOKENS,
    Prompt,
    Reference,
    ask,
    ask_all,
    assert_intact,
    differs,
    make_prompts,
    reference,
    stats,
    stream,
)
from e2e.waiting import until

pytestmark = pytest.mark.server

# Two of the longest prompts, so that most of a pass comes from host.
DEVICE_TOKENS = 1024
CHUNK_TOKENS = 128


@dataclass(frozen=True)
class Setup:
    name: str
    dtype: str
    page_size: int
    flags: tuple[str, ...]
    prompts: int = 56


CHUNKED = ("--chunked-prefill-size", str(CHUNK_TOKENS))
EAGER_PLUS = ("--radix-eviction-policy", "pgdsf-plus")
EAGER_PLUS += ("--radix-eviction-policy-config", '{"swap_out": "eager"}')
SETUPS = {
    setup.name: setup
    for setup in (
        Setup("paged-chunked-overlap", "float32", 16, CHUNKED, prompts=32),
        Setup("unpaged-chunked", "float32", 1, (*CHUNKED, "--disable-overlap-schedule")),
        Setup("paged-whole", "float32", 16, ("--disable-overlap-schedule",)),
        Setup("unpaged-whole-overlap", "float32", 1, ()),
        Setup("lru", "float32", 16, (*CHUNKED, "--radix-eviction-policy", "lru")),
        Setup("pgdsf-plus", "float32", 16, (*CHUNKED, *EAGER_PLUS)),
        Setup("bf16", "bfloat16", 16, CHUNKED, prompts=20),
    )
}
ORDINARY = "paged-chunked-overlap"


def serving(setup: Setup):
    return running_server(
        MODEL,
        "--radix-cache-backend",
        "knowledge-tree",
        "--enable-hierarchical-cache",
        "--hicache-ratio",
        "6",
        "--max-total-tokens",
        str(DEVICE_TOKENS),
        "--page-size",
        str(setup.page_size),
        "--dtype",
        setup.dtype,
        *setup.flags,
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == ORDINARY else pytest.mark.slow) for name in SETUPS
    ],
)
def setup(request: pytest.FixtureRequest) -> Setup:
    return SETUPS[request.param]


@pytest.fixture(scope="module")
def prompts(setup: Setup) -> list[Prompt]:
    return make_prompts(setup.prompts, page_size=16, chunk_tokens=CHUNK_TOKENS)


@functools.cache
def references(dtype: str, prompts: tuple[Prompt, ...]) -> list[Reference]:
    flags = ["--disable-radix-cache", "--attention-backend", "torch_native", "--dtype", dtype]
    with running_server(MODEL, *flags) as stock:
        return [reference(stock, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def expected(setup: Setup, prompts: list[Prompt]) -> list[Reference]:
    return references(setup.dtype, tuple(prompts))


@pytest.fixture(scope="module")
def server(setup: Setup, expected: list[Reference]) -> Iterator[Server]:
    with serving(setup) as running:
        yield running


@pytest.fixture(scope="module")
def margin(setup: Setup) -> float:
    return BF16_MARGIN if setup.dtype == "bfloat16" else 0.0


def test_every_way_a_prompt_can_be_cached_gives_the_same_answer(server, prompts, expected, margin):
    kinds: Counter[str] = Counter()
    wrong = []

    def check(index, answer):
        problem = differs(answer.tokens, expected[index], margin=margin)
        hit = ("cold", "device", "host", "mixed")[
            (answer.device_hit > 0) + 2 * (answer.host_hit > 0)
        ]
        kinds[hit] += 1
        if problem or len(answer.tokens) != OUTPUT_TOKENS:
            wrong.append(f"prompt {index}, {hit}: {problem}")

    server.flush_cache()
    for index, prompt in enumerate(prompts):
        check(index, ask(server, prompt))
        if index % 4 == 0:
            check(index, ask(server, prompt))  # now on the device
    for index, answer in enumerate(ask_all(server, prompts, concurrency=8)):
        check(index, answer)
    assert not wrong
    assert kinds["device"] > 0
    assert kinds["mixed"] + kinds["host"] > len(prompts) // 3
    report = assert_intact(server)
    assert report["swap"]["in_tokens"] > 10 * len(prompts)


def test_a_cold_tree_gives_the_same_answer_as_a_warm_one(server, prompts, expected, margin):
    for index in range(0, len(prompts), 14):
        server.flush_cache()
        answer = ask(server, prompts[index])
        assert (answer.device_hit, answer.host_hit) == (0, 0)
        assert differs(answer.tokens, expected[index], margin=margin) is None
    assert_intact(server)


def test_aborting_at_any_moment_leaks_nothing_and_later_answers_are_right(
    server, prompts, expected, margin
):
    server.flush_cache()
    longest = max(prompts, key=lambda p: len(p.tokens))

    def aborted_after(wait_s: float) -> None:
        """Wherever the request is then; it may have its answer, or not be known yet."""
        rid = uuid.uuid4().hex
        with ThreadPoolExecutor(1) as pool:
            doomed = pool.submit(server.generate, **longest.body(rid=rid))
            with suppress(TimeoutError):
                doomed.result(wait_s)
            server.post("/abort_request", {"rid": rid})
            assert doomed.result()["meta_info"]["finish_reason"]["type"] in ("abort", "length")

    abort_while_it_waits(server, prompts[:8], longest)
    for wait_s in (0.02, 0.05, 0.1, 0.2):  # during a chunk, or before it
        aborted_after(wait_s)
        server.flush_cache()
    ask_all(server, prompts[:8], concurrency=1)
    for wait_s in (0.01, 0.03, 0.06):  # around the load-back of what is on host
        aborted_after(wait_s)
    abort_while_it_decodes(server, longest)
    for index in range(0, len(prompts), 9):
        answer = ask(server, prompts[index])
        assert differs(answer.tokens, expected[index], margin=margin) is None
    assert_intact(server)


def abort_while_it_waits(server: Server, before: list[Prompt], prompt: Prompt) -> None:
    """Ask `prompt` behind others, more than run at once."""
    rid = uuid.uuid4().hex
    with ThreadPoolExecutor(len(before) + 1) as pool:
        others = [pool.submit(ask, server, other) for other in before]
        until(lambda: server.get("/rag/pool")["waiting"])
        doomed = pool.submit(server.generate, **prompt.body(rid=rid))
        until(lambda: server.post("/abort_request", {"rid": rid}) or doomed.done())
        assert doomed.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert {len(other.result().tokens) for other in others} == {OUTPUT_TOKENS}


def abort_while_it_decodes(server: Server, prompt: Prompt) -> None:
    rid = uuid.uuid4().hex
    events = stream(server, prompt.body(output_tokens=400, rid=rid))
    next(events)
    server.post("/abort_request", {"rid": rid})
    *_, last = events
    assert last["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_stream_that_is_left_ends_its_request(server, prompts):
    events = stream(server, prompts[0].body(output_tokens=400))
    next(events)
    events.close()
    until(lambda: not stats(server)["device"]["locked_tokens"])
    assert_intact(server)


@pytest.mark.parametrize("setup", [ORDINARY], indirect=True)
@pytest.mark.parametrize("requests", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_requests_of_8_clients_with_aborts_on_a_tier_of_two_prompts(
    server, prompts, expected, margin, requests
):
    rng = random.Random(11)
    doomed = [rng.random() < 0.12 for _ in range(requests)]
    work = [(rng.randrange(len(prompts)), each, rng.random()) for each in doomed]
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    lock = threading.Lock()

    def run(job):
        index, is_doomed, moment = job
        rid = uuid.uuid4().hex
        timer = threading.Timer(moment * 2, server.post, ("/abort_request", {"rid": rid}))
        if is_doomed:
            timer.start()
        reply = server.generate(**prompts[index].body(rid=rid))
        timer.cancel()
        kind = reply["meta_info"]["finish_reason"]["type"]
        problem = differs(reply["output_ids"], expected[index], margin=margin)
        with lock:
            outcomes[kind] += 1
            if problem or (kind == "length" and len(reply["output_ids"]) != OUTPUT_TOKENS):
                problems.append(f"prompt {index} ({kind}): {problem}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, work))
    assert not problems
    assert outcomes.total() == requests
    # The answer of one that is doomed may have come before its end.
    assert outcomes["abort"] <= sum(doomed)
    report = assert_intact(server)
    assert report["device"]["evicted_nodes"] > requests // 3
