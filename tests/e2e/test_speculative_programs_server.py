"""Programs that speculate, on the real server: right answers, and nothing left behind."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import sglang as sgl
from e2e.cpu_server import Server, running_server
from e2e.exactness import BF16_MARGIN, MODEL, differs, reference_of
from e2e.tiny_model import make_tiny_llama
from e2e.waiting import until
from rag_radix_frontend import Document, RagEndpoint, ScoredDocument, Stage, rag_retrieve
from rag_radix_frontend.errors import RequestAborted

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore:Error in stream_executor"),
]

# Few rows, so that requests wait and speculations are refused and ended.
FLAGS = ["--radix-cache-backend", "knowledge-tree", "--dtype", "float32"]
FLAGS += ["--max-total-tokens", "8192", "--chunked-prefill-size", "256"]
FLAGS += ["--max-running-requests", "3"]

DOCUMENTS = [
    Document(name, topics[name][: 300 + 40 * i]) for i, name in enumerate(sorted(topics)[:12])
]
CHOICES = ["red", "green", "blue"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running_server(model, *FLAGS) as running:
        yield running


@pytest.fixture
def backend(server: Server) -> Iterator[RagEndpoint]:
    """An endpoint whose programs leave nothing behind: no thread, no request, no slot."""
    backend = RagEndpoint(server.url, chat_template_name="chatml", strict=True)
    yield backend
    until(lambda: is_idle(server))
    until(lambda: not threads())
    assert not [r for r in backend._in_flight._of.values() if r.rids]
    server.flush_cache()
    device = server.get("/rag/stats")["device"]
    assert device["free_tokens"] == device["capacity_tokens"]


def threads() -> list[threading.Thread]:
    names = ("rag-worker", "rag-gate")
    return [thread for thread in threading.enumerate() if thread.name in names]


def is_idle(server: Server) -> bool:
    stats = server.get("/rag/stats")
    busy = stats["speculation"]["in_flight"] or stats["device"]["locked_tokens"]
    return not busy and server.get("/rag/pool")["waiting"] == 0


class Scripted:
    """A retriever that finds what it is told, and does in between what it is told."""

    def __init__(self, *script: tuple[Document, ...] | Callable[[], object]) -> None:
        self._script = script

    def retrieve(self, query: str, k: int) -> Iterator[Stage]:
        for i, step in enumerate(self._script, 1):
            if isinstance(step, tuple):
                found = tuple(ScoredDocument(document, 1.0) for document in step)
                yield Stage(found, final=i == len(self._script))
            else:
                step()


@sgl.function
def sentence(s: Any, retrieve: Any, question: str) -> None:
    s += "Passages: " + retrieve() + question
    s += sgl.gen("answer", max_tokens=8, temperature=0, ignore_eos=True)


@sgl.function
def chat(s: Any, retrieve: Any, question: str) -> None:
    s += sgl.system("Answer from the documents.")
    s += sgl.user(retrieve() + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=8, temperature=0) + "." + sgl.gen("more", 4))


@sgl.function
def choice(s: Any, retrieve: Any, question: str) -> None:
    s += retrieve() + question
    s += "It is " + sgl.select("answer", CHOICES)


@sgl.function
def constrained(s: Any, retrieve: Any, question: str) -> None:
    with s.user():
        s += retrieve()
        s += question
    with s.assistant():
        s += sgl.gen("answer", max_tokens=6, temperature=0, regex="[0-9]{4}")


@dataclass(frozen=True)
class Task:
    """A program, what its search will have found in the end, and how it is run."""

    program: Any
    final: tuple[Document, ...]
    question: str
    stream: bool

    def run(self, backend: RagEndpoint, retriever: Any, *, speculative: bool) -> Any:
        return self.program.run(
            retrieve=lambda: rag_retrieve(retriever, "q", speculative=speculative),
            question=self.question,
            backend=backend,
            temperature=0,
            stream=self.stream,
        )


def tasks() -> list[Task]:
    rng = random.Random(3)
    return [
        Task(program, tuple(rng.sample(DOCUMENTS, 2)), f"\nQuestion {i}?\n", stream)
        for i in range(4)
        for program in (sentence, chat, choice, constrained)
        for stream in (False, True)
    ]


def answer_of(state: Any) -> tuple[str, str]:
    return "".join(state.text_iter("answer")), state.text()


def wandering(rng: random.Random, final: tuple[Document, ...]) -> Scripted:
    """A search that finds this and that, sometimes the right documents early."""
    script: list[Any] = []
    for _ in range(rng.randrange(6)):
        known = rng.random() < 0.4
        script.append(final if known else tuple(rng.sample(DOCUMENTS, rng.randint(1, 2))))
        script.append(partial(time.sleep, rng.random() * 0.15))
    return Scripted(*script, final)


def test_programs_with_random_searches_and_cancellations_give_the_answers_they_must(
    server: Server, backend: RagEndpoint
) -> None:
    kinds = tasks()
    expected = {
        task: answer_of(task.run(backend, Scripted(task.final), speculative=False))
        for task in kinds
    }
    rng = random.Random(11)
    plans = [(rng.choice(kinds), rng.randrange(10**9)) for _ in range(200)]

    def run(plan: tuple[Task, int]) -> bool:
        task, seed = plan
        rng = random.Random(seed)
        state = task.run(backend, wandering(rng, task.final), speculative=True)
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.5)
            backend.cancel(state)
        try:
            answer = answer_of(state)
        except RequestAborted:
            return False
        assert answer == expected[task]
        return True

    with ThreadPoolExecutor(8) as pool:
        answered = list(pool.map(run, plans))
    assert answered.count(True) >= 150

    until(lambda: not threads())
    total = backend.retrievals()
    fates = total.refused + total.ended + total.failed + total.cancelled + total.kept
    assert fates == total.started
    assert total.failed == 0
    assert total.kept > 0
    assert total.cancelled > 0
    assert server.get("/rag/stats")["speculation"]["promoted"] >= total.kept


@pytest.mark.parametrize("stream", [False, True])
def test_a_guess_that_was_right_is_the_answer_and_the_only_request(
    server: Server, backend: RagEndpoint, stream: bool
) -> None:
    task = Task(sentence, tuple(DOCUMENTS[:2]), "Who?", stream)
    before = server.get("/rag/stats")

    def started() -> bool:
        stats = server.get("/rag/stats")["speculation"]
        return bool(stats["started"] > before["speculation"]["started"])

    retriever = Scripted(task.final, lambda: until(started), task.final)
    state = task.run(backend, retriever, speculative=True)
    answer = answer_of(state)
    report = state.get_meta_info("docs")
    assert (report.started, report.kept, report.cancelled) == (1, 1, 0)
    assert report.search_not_overlapped_s < report.search_s

    def promoted() -> bool:
        stats = server.get("/rag/stats")["speculation"]
        return bool(stats["promoted"] == before["speculation"]["promoted"] + 1)

    until(promoted)
    after = server.get("/rag/stats")
    assert after["requests"]["requests"] == before["requests"]["requests"] + 1
    assert answer == answer_of(task.run(backend, Scripted(task.final), speculative=False))


def test_wrong_guesses_leave_their_documents_for_the_answer(
    server: Server, backend: RagEndpoint
) -> None:
    first, second, third = DOCUMENTS[3:6]
    task = Task(sentence, (first, third), "Who?", stream=False)
    before = server.get("/rag/stats")["requests"]

    def computed() -> bool:
        return bool(server.get("/rag/stats")["device"]["documents"] >= 2)

    retriever = Scripted((first, second), lambda: until(computed), task.final)
    state = task.run(backend, retriever, speculative=True)
    assert state["answer"]
    meta = state.get_meta_info("answer")
    assert meta["cached_tokens"] > 50
    until(lambda: state.get_meta_info("docs").cancelled == 1)
    after = server.get("/rag/stats")["requests"]
    assert after["requests"] == before["requests"] + 1
    assert after["documents"] == before["documents"] + 2


@sgl.function
def scored(s: Any, retrieve: Any, question: str) -> None:
    s += "Passages: " + retrieve() + question
    s += sgl.gen(
        "answer",
        max_tokens=12,
        temperature=0,
        ignore_eos=True,
        return_logprob=True,
        top_logprobs_num=2,
    )


@pytest.mark.slow
def test_in_bf16_a_token_differs_only_where_the_two_best_were_within_the_margin() -> None:
    rng = random.Random(5)
    asked = [
        Task(scored, tuple(rng.sample(DOCUMENTS, 2)), f"\nQuestion {i}: which statement?\n", False)
        for i in range(40)
    ]
    flags = ["bfloat16" if flag == "float32" else flag for flag in FLAGS]
    with running_server(MODEL, *flags) as server:
        backend = RagEndpoint(server.url, chat_template_name="chatml", strict=True)

        def answered(task: Task, retriever: Any, speculative: bool) -> Any:
            state = task.run(backend, retriever, speculative=speculative)
            assert state["answer"]
            return reference_of(state.get_meta_info("answer"))

        def compared(task: Task) -> str | None:
            retriever = wandering(random.Random(task.question), task.final)
            guessed = answered(task, retriever, True)
            assert len(guessed.tokens) == 12
            return differs(guessed.tokens, expected[task], margin=BF16_MARGIN)

        expected = {task: answered(task, Scripted(task.final), False) for task in asked}
        server.flush_cache()
        with ThreadPoolExecutor(3) as pool:
            assert [problem for problem in pool.map(compared, asked) if problem] == []
        until(lambda: is_idle(server))
        total = backend.retrievals()
        assert min(total.kept, total.cancelled) > 0


@pytest.mark.slow
def test_a_server_that_refuses_every_speculation_answers_as_well(model: Path) -> None:
    config = json.dumps({"max_prefill_bs": 0})
    with running_server(model, *FLAGS, "--radix-eviction-policy-config", config) as server:
        backend = RagEndpoint(server.url, chat_template_name="chatml", strict=True)
        expected = {
            task: answer_of(task.run(backend, Scripted(task.final), speculative=False))
            for task in tasks()
        }

        def run(task: Task) -> tuple[str, str]:
            retriever = wandering(random.Random(task.question), task.final)
            return answer_of(task.run(backend, retriever, speculative=True))

        with ThreadPoolExecutor(8) as pool:
            assert dict(zip(expected, pool.map(run, expected), strict=True)) == expected
        assert backend.retrievals().started == 0
        assert backend.retrievals().withheld > 0
        assert server.get("/rag/stats")["speculation"]["started"] == 0
