"""Many programs on a server that refuses, ends, forgets and delays at random."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import sglang as sgl
from rag_radix_frontend import RagEndpoint, rag_retrieve
from rag_radix_frontend.errors import RequestAborted
from unit.frontend.speculative_programs import GUESS, OTHER, SPECULATING, settled
from unit.frontend.speculative_server import Request, Scripted, SpeculativeServer, eventually

pytestmark = SPECULATING

PROGRAMS = 200


@sgl.function
def program(s: Any, retriever: Any, i: int, kind: str) -> None:
    s += sgl.user(rag_retrieve(retriever, "q") + f"Question {i}?")
    if kind == "choice":
        s += sgl.assistant(sgl.select("answer", ["pets", "stars"]))
    else:
        s += sgl.assistant("It is " + sgl.gen("answer", temperature=0))


class Chaos(threading.Thread):
    """Lets a server's speculations go, or ends them, and fills and drains its pool."""

    def __init__(self, server: SpeculativeServer) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._rng = random.Random(5)
        self.over = threading.Event()
        server.hold = lambda request: request.speculative
        server.hold_after = 3
        server.promote = self._promote

    def _promote(self, request: Request | None) -> str:
        if request is None or random.random() < 0.1:
            return "unknown"
        with self._server._promotion:
            if request.end is not None:
                return "unknown"
            request.promoted = True
            return "finished" if request.finished else "running"

    def run(self) -> None:
        while not self.over.wait(0.005):
            if self._rng.random() < 0.1:
                self._server.waiting = self._rng.choice([0, 0, 4])
            held = [r for r in list(self._server.requests) if not r.go.is_set()]
            for request in self._rng.sample(held, (len(held) + 1) // 2):
                if self._rng.random() < 0.3:
                    self._server.end_guess(request)
                request.go.set()
        self._server.hold = lambda request: False
        for request in list(self._server.requests):
            request.go.set()


def test_whatever_the_server_does_every_program_gets_its_answer(
    server: SpeculativeServer, backend: RagEndpoint
) -> None:
    chaos = Chaos(server)

    def run(i: int) -> bool:
        rng = random.Random(i)
        script: list[Any] = []
        for _ in range(rng.randrange(5)):
            script.append(rng.choice([GUESS, OTHER, GUESS[:1]]))
            script.append(partial(time.sleep, rng.random() * 0.06))
        final = rng.choice([GUESS, OTHER])
        kind = rng.choice(["text", "text", "choice"])
        state = program.run(
            Scripted(*script, final), i, kind, backend=backend, stream=rng.random() < 0.5
        )
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.2)
            backend.cancel(state)
        try:
            answer = "".join(state.text_iter("answer"))
        except RequestAborted:
            return False
        prompt = state.text().rsplit(answer, 1)[0]
        assert all(document.text in prompt for document in final)
        expected = ("pets", "stars") if kind == "choice" else (f"[{len(prompt)}:'is ']",)
        assert answer in expected
        return True

    chaos.start()
    with ThreadPoolExecutor(16) as pool:
        answered = sum(pool.map(run, range(PROGRAMS)))
    assert answered > PROGRAMS // 2
    chaos.over.set()
    eventually(lambda: settled(backend.retrievals()))
    total = backend.retrievals()
    assert min(total.kept, total.cancelled, total.ended) > 0
    assert not [one for one in backend._in_flight._of.values() if one.rids]
    held = [r for r in server.requests if not (r.go.is_set() or r.finished)]
    assert held == []
