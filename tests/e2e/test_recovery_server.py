"""Connections break and schedulers die, and programs get their answers all the same."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pydoc_data.topics import topics
from typing import Any

import psutil
import pytest
import sglang as sgl
from breaking_proxy import BreakingProxy
from e2e.cpu_server import Server, running_server
from e2e.tiny_model import make_tiny_llama
from rag_radix_frontend import CallableRetriever, Document, RagEndpoint, Retries, rag_retrieve
from rag_radix_frontend.errors import RequestError

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Error in stream_executor"),
]

FLAGS = ["--restarts", "3", "--dtype", "float32", "--context-length", "2048"]
FLAGS += ["--max-total-tokens", "8192", "--hicache-ratio", "2"]
DOCUMENTS = [Document(name, topics[name][:600]) for name in sorted(topics)[:12]]
CLIENTS = 4
# A server takes most of a minute to come back.
PATIENT = Retries(attempts=200, first_pause_s=0.1, longest_pause_s=1.0, continues=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def supervised(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    flags, env = [*FLAGS, "--tp-size", str(request.param)], {}
    if request.param == 2:
        env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with running_server(model, *flags, program="rag-radix", env=env) as server:
        yield server


def retrieve(query: str, k: int) -> list[Document]:
    first = int(query)
    return [DOCUMENTS[(first + i) % len(DOCUMENTS)] for i in range(k)]


@sgl.function
def program(s: Any, question: int, tokens: int) -> None:
    s += sgl.system("Answer from the documents.")
    s += sgl.user(rag_retrieve(CallableRetriever(retrieve), str(question)) + f"Why {question}?")
    s += sgl.assistant(
        sgl.gen("answer", max_tokens=tokens, min_tokens=tokens, temperature=0, ignore_eos=True)
    )


def ask(backend: RagEndpoint, question: int, *, tokens: int = 24, stream: bool) -> str:
    state = program.run(question=question, tokens=tokens, backend=backend, stream=stream)
    if stream:
        shown = "".join(state.text_iter("answer"))
        assert shown == state["answer"]
    answer: str = state["answer"]
    assert state.get_meta_info("answer")["completion_tokens"] == tokens
    return answer


def endpoint(url: str) -> RagEndpoint:
    return RagEndpoint(url, chat_template_name="chatml", strict=True, retries=PATIENT)


def scheduler_of(server: Server) -> psutil.Process:
    """Its only one or, of two ranks, either."""
    return next(
        process
        for process in psutil.Process(server.pid).children(recursive=True)
        if "scheduler" in " ".join(process.cmdline())
    )


def test_a_stream_that_is_cut_goes_on_as_if_it_had_not_been(supervised: Server) -> None:
    proxy = BreakingProxy(supervised.url)
    unbroken, broken = endpoint(supervised.url), endpoint(proxy.url)
    before = supervised.get("/rag/stats")["requests"]["requests"]
    for question in range(6):
        expected = ask(unbroken, question, stream=True)
        # Each event repeats all before it.
        proxy.cuts = [1500 + 1700 * question]
        assert ask(broken, question, stream=True) == expected
        assert proxy.cuts == []
    # What is sent to go on is no retrieval of its own.
    assert supervised.get("/rag/stats")["requests"]["requests"] == before + 12
    proxy.close()


def test_every_program_is_answered_although_the_scheduler_dies(supervised: Server) -> None:
    backend = endpoint(supervised.url)
    questions = list(range(60))
    expected = [ask(backend, question, stream=False) for question in questions]
    answered = threading.Semaphore(0)

    def again(question: int) -> str:
        answer = ask(backend, question, stream=question % 2 == 0)
        answered.release()
        return answer

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = pool.map(again, questions)
        for _ in range(10):
            answered.acquire()
        scheduler_of(supervised).kill()
        assert list(answers) == expected
    assert "restart 1 of 3" in supervised.log()
    assert supervised.get("/rag/stats")["device"]["documents"] > 0


def test_a_server_that_is_told_to_end_under_load_does_and_is_not_started_again(
    supervised: Server,
) -> None:
    expected = ask(endpoint(supervised.url), 1, tokens=400, stream=False)
    hasty = RagEndpoint(supervised.url, chat_template_name="chatml", retries=Retries(attempts=1))
    outcomes: list[str | RequestError] = []

    def client() -> None:
        try:
            outcomes.append(ask(hasty, 1, tokens=400, stream=True))
        except RequestError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    supervisor = psutil.Process(supervised.pid)
    supervisor.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert outcomes == [expected] * CLIENTS
    assert supervisor.wait(60) == 0
    assert "restart 2 of 3" not in supervised.log()
