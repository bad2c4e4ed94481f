"""Clients that ask about documents, some of which are asked for more often than others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rag_radix_benchmarks.prompts import PromptWriter
from rag_radix_frontend.connections import Connections

from rag_radix.replay.trace import TraceDocument, TraceRequest

_SYSTEM_TOKENS = 32
_QUESTION_TOKENS = 16
_PAUSE_S = 0.2
# Of a vocabulary of any size, past what is special.
_TOKEN_IDS = range(1000, 20000)

Body = dict[str, Any]


@dataclass(frozen=True)
class Corpus:
    """Documents of one length, the n-th of which is asked for in proportion to n ** -skew.

    Attributes:
        documents: How many there are.
        tokens: Length of each.
        a_prompt: How many stand in a prompt. The second and further ones are those that mostly
            come with the first.
        skew: 0 asks for all alike.
        output_tokens: What is generated for a prompt.
    """

    documents: int
    tokens: int
    a_prompt: int = 2
    skew: float = 0.8
    output_tokens: int = 4

    def bodies(self, seed: int) -> Iterator[Body]:
        """Requests for `/generate` without end; each question is asked once."""
        writer = PromptWriter(_TOKEN_IDS)
        # The seed tells questions of different loads apart; documents are the same.
        for number, request in enumerate(self.requests(seed), start=seed * 10**9):
            yield writer.body(request, number)

    def requests(self, seed: int) -> Iterator[TraceRequest]:
        """What is asked, without texts."""
        rng = random.Random(seed)
        weights = [(rank + 1) ** -self.skew for rank in range(self.documents)]
        while True:
            (first,) = rng.choices(range(self.documents), weights)
            # One of three followers each.
            chosen = [first]
            while len(chosen) < self.a_prompt:
                chosen.append((chosen[-1] * 7 + rng.choice((1, 1, 1, 2, 3))) % self.documents)
            spans = tuple(
                TraceDocument(f"document/{document}", "", at, at + self.tokens)
                for document, at in zip(
                    chosen,
                    range(
                        _SYSTEM_TOKENS, _SYSTEM_TOKENS + self.a_prompt * self.tokens, self.tokens
                    ),
                    strict=True,
                )
            )
            length = spans[-1].end + _QUESTION_TOKENS
            yield TraceRequest(0.0, spans, length, self.output_tokens)


@dataclass(frozen=True)
class Served:
    """An answered request.

    Attributes:
        at_s: When, by `time.monotonic()`.
        prompt_tokens: Its length.
        cached_tokens: What of it wasn't computed, whichever tier it came from.
    """

    at_s: float
    prompt_tokens: int
    cached_tokens: int


def hit_rate(served: list[Served]) -> float:
    """Share of the tokens that weren't computed."""
    return sum(one.cached_tokens for one in served) / sum(one.prompt_tokens for one in served)


def read_generate(reply: Any) -> tuple[int, int]:
    """Tokens of the prompt and those that weren't computed, as `/generate` says it."""
    meta = reply["meta_info"]
    return meta["prompt_tokens"], meta["cached_tokens"]


def read_completion(reply: Any) -> tuple[int, int]:
    """The same of an OpenAI completion, from a server with `--enable-cache-report`."""
    usage = reply["usage"]
    return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


class Load:
    """A closed loop of clients, each of which asks again whatever breaks off.

    Attributes:
        served: The answers so far, in the order in which they came.
    """

    def __init__(
        self,
        url: str,
        bodies: Iterator[Body],
        clients: int,
        *,
        route: str = "/generate",
        read: Callable[[Any], tuple[int, int]] = read_generate,
        headers: Callable[[Body], Mapping[str, str]] = lambda body: {},
    ) -> None:
        self.served: list[Served] = []
        self._connections = Connections(url)
        self._bodies = bodies
        self._route, self._read, self._headers = route, read, headers
        self._drawing = threading.Lock()
        self._ending = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._client) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def wait_for(self, count: int) -> list[Served]:
        """The answers once there are so many.

        Raises:
            RuntimeError: a client has met a refusal.
        """
        while len(self.served) < count:
            if self._failure is not None:
                raise RuntimeError("a client of the load has failed") from self._failure
            time.sleep(0.02)
        return list(self.served)

    def end(self) -> None:
        """Let the clients finish what they are asking."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _client(self) -> None:
        try:
            while not self._ending.is_set():
                with self._drawing:
                    body = next(self._bodies, None)
                if body is None:
                    return
                self._ask(body)
        except BaseException as error:
            self._failure = error

    def _ask(self, body: Body) -> None:
        while not self._ending.is_set():
            try:
                reply = self._connections.request(
                    self._route, body, once=True, headers=self._headers(body)
                )
                if reply.status_code < 500:
                    self.served.append(Served(time.monotonic(), *self._read(reply.json())))
                    return
            except OSError:
                pass
            self._ending.wait(_PAUSE_S)
