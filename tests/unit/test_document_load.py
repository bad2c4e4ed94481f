"""The load of the benchmarks of recovery and routing, against a small server."""

from __future__ import annotations

import importlib
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from unit.frontend.token_server import TokenServer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("document_load")


def test_few_documents_are_asked_for_often_and_questions_are_new(load: Any) -> None:
    corpus = load.Corpus(documents=20, tokens=32)
    requests = list(islice(corpus.requests(seed=1), 400))
    counts = Counter(request.documents[0].id for request in requests)
    assert counts["document/0"] > 3 * counts["document/19"]
    assert all(len(request.documents) == 2 for request in requests)
    bodies = list(islice(corpus.bodies(seed=1), 50))
    assert len({tuple(body["input_ids"][-16:]) for body in bodies}) == 50
    texts = {
        (document["id"], tuple(body["input_ids"][document["start"] : document["end"]]))
        for body in bodies
        for document in body["sampling_params"]["custom_params"]["rag"]["documents"]
    }
    assert len(texts) == len({name for name, _ in texts})


def test_completions_say_where_the_same_documents_are(load: Any) -> None:
    completions = importlib.import_module("bench_routing")._completions
    texts = {
        (document["id"], body["prompt"][document["start"] : document["end"]])
        for body in islice(completions(load.Corpus(documents=20, tokens=32)), 100)
        for document in body["custom_params"]["rag"]["documents"]
    }
    assert len({name for name, _ in texts}) == len({text for _, text in texts}) == len(texts)


def test_clients_ask_again_what_breaks_off_and_end_with_the_requests(load: Any) -> None:
    server = TokenServer("yes")
    server.statuses = [503, 200, 503]
    bodies = iter([{"text": f"{n}", "sampling_params": {"max_new_tokens": 2}} for n in range(6)])

    def read(reply: Any) -> tuple[int, int]:
        return reply["meta_info"]["prompt_tokens"], 1

    clients = load.Load(server.url, bodies, clients=2, read=read)
    served = clients.wait_for(6)
    clients.end()
    assert len(clients.served) == 6
    assert load.hit_rate(served) == 1.0
    server.close()


def test_a_refusal_fails_the_load(load: Any) -> None:
    server = TokenServer("yes")
    server.statuses = [400]
    bodies = iter([{"text": "a", "sampling_params": {"max_new_tokens": 2}}])
    clients = load.Load(server.url, bodies, clients=1)
    with pytest.raises(RuntimeError, match="client of the load has failed"):
        clients.wait_for(1)
    clients.end()
    server.close()
