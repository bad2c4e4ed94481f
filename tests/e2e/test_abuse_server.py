"""Ten thousand random and hostile requests leave a server as it was."""

from __future__ import annotations

import http.client
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from e2e.cpu_server import Server, running_server
from e2e.exactness import ask, assert_intact, make_prompts
from e2e.tiny_model import make_tiny_llama
from hostile import Call, dumped, requests

pytestmark = [pytest.mark.server, pytest.mark.slow]

FLAGS = ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]
FLAGS += ["--max-total-tokens", "2048", "--hicache-ratio", "2", "--context-length", "1024"]
FLAGS += ["--chat-template", "chatml", "--dtype", "float32", "--chunked-prefill-size", "128"]
# Every call into the tree is compared between the ranks, and a difference ends the server.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    flags, env = [*FLAGS, "--tp-size", str(request.param)], TWO_RANKS if request.param == 2 else {}
    with running_server(model, *flags, env=env) as running:
        yield running


def send(server: Server, call: Call) -> tuple[int, str]:
    """Status and text of the answer, of a stream all of it."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("GET" if call.body is None else "POST", call.path, call.body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise AssertionError(f"no answer to {call}: {error}\n{server.log()[-3000:]}") from None
    finally:
        connection.close()


def test_nothing_that_is_sent_ends_hangs_or_changes_the_server(server: Server) -> None:
    prompts = make_prompts(4, page_size=16, chunk_tokens=128)
    before = [ask(server, prompt).tokens for prompt in prompts]
    answers: Counter[tuple[str, int]] = Counter()

    def one(call: Call) -> None:
        status, text = send(server, call)
        answers[call.path.partition("?")[0], status] += 1
        # A speculation that is refused is no failure of the server's.
        fine = 200 <= status < 500 or (status == 503 and "speculation" in text)
        assert fine, (call, status, text[:500])
        assert not re.search(r'"code": ?5(?!03)', text), (call, text[:500])

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(one, requests(10_000, seed=1)):
            pass
    print(sorted(answers.items()))
    assert {status for _, status in answers} >= {200, 400, 404}
    assert sum(count for (path, status), count in answers.items() if status == 200) > 2_000
    while server.get("/rag/warm")["state"] == "running" or server.get("/rag/pins")["pins"]:
        for pin in server.get("/rag/pins")["pins"]:
            send(server, Call("/rag/unpin", dumped({"id": pin["id"]})))
        time.sleep(0.2)
    assert_intact(server)
    assert [ask(server, prompt).tokens for prompt in prompts] == before
    server.flush_cache()
    assert [ask(server, prompt).tokens for prompt in prompts] == before
    report = assert_intact(server)
    assert report["control"]["retired_nodes"] == 0
    log = server.log()
    assert "Traceback" not in log
    assert "\x1b[31m" not in log
    assert "\u202e" not in log
