"""The load of a benchmark: one asynchronous client, open or closed loop."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from rag_radix.errors import RagRadixError

REQUEST_LIMIT_S = 1_800.0
# Often enough for a mean, and too seldom to be a load itself.
PROBE_S = 0.01


class LoadError(RagRadixError, RuntimeError):
    """A server answered a request of the load with an error."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went, in the client's clock.

    Attributes:
        ttft_s: From when the request was due to its first output token.
        latency_s: From when it was due to its last one.
        late_s: How long after it was due the client sent it; more than some milliseconds
            mean that the client itself is what is being measured.
        prompt_tokens: Tokens of the prompt.
        device_tokens: Of them, found in the device tier.
        host_tokens: Of them, loaded back from host memory.
        output_tokens: Tokens generated.
        output_ids: These; empty where a server doesn't tell.
        hits_counted: Whether the server says how many were found in its tiers.
        search_not_overlapped_s: Of a program, how long it searched before the generation that
            became its answer began; None where nothing is searched.
    """

    ttft_s: float
    latency_s: float
    late_s: float
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    output_tokens: int
    output_ids: tuple[int, ...]
    hits_counted: bool = True
    search_not_overlapped_s: float | None = None

    @property
    def hit_tokens(self) -> int:
        return self.device_tokens + self.host_tokens

    @property
    def tpot_s(self) -> float | None:
        """Time for an output token after the first; None where there was no other."""
        later = self.output_tokens - 1
        return (self.latency_s - self.ttft_s) / later if later > 0 else None


@dataclass(frozen=True, slots=True)
class Run:
    """One load from its first request to its last answer.

    Attributes:
        outcomes: By request, in the order given.
        due_s: By request, when it was due, from the start of the run.
        seconds: Length of the run.
        lag_s: By how much the client was late on average for something of its own that was due
            meanwhile, and so for what a server sent it; None where that wasn't looked at.
    """

    outcomes: tuple[Outcome, ...]
    due_s: tuple[float, ...]
    seconds: float
    lag_s: float | None = None

    @property
    def ttft_s(self) -> list[float]:
        return [outcome.ttft_s for outcome in self.outcomes]

    @property
    def hits_counted(self) -> bool:
        """Whether the server counts what it finds; one that found nothing may leave that out."""
        return any(outcome.hits_counted for outcome in self.outcomes)

    @property
    def token_hit_rate(self) -> float:
        return sum(outcome.hit_tokens for outcome in self.outcomes) / sum(
            outcome.prompt_tokens for outcome in self.outcomes
        )


# Sends a payload that is due at a time of `time.perf_counter()` to the server at a URL.
Ask = Callable[[aiohttp.ClientSession, str, bytes, float], Awaitable[Outcome]]


async def ask_generate(
    session: aiohttp.ClientSession, url: str, payload: bytes, due: float
) -> Outcome:
    """Ask SGLang's own `/generate`.

    Raises:
        LoadError: The server answered with an error.
    """
    late_s = time.perf_counter() - due
    first_s, event = None, None
    async for event in events(session, f"{url}/generate", payload):
        reason = event["meta_info"]["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise LoadError(f"{url}/generate aborted a request: {reason.get('message')}")
        first_s = time.perf_counter() - due if first_s is None else first_s
    if event is None or first_s is None:
        raise LoadError(f"{url}/generate answered nothing; the server's log may say why")
    meta = event["meta_info"]
    details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"], "host": 0}
    return Outcome(
        ttft_s=first_s,
        latency_s=time.perf_counter() - due,
        late_s=late_s,
        prompt_tokens=meta["prompt_tokens"],
        device_tokens=details["device"],
        host_tokens=details["host"],
        output_tokens=meta["completion_tokens"],
        output_ids=tuple(event["output_ids"]),
    )


async def events(
    session: aiohttp.ClientSession, url: str, payload: bytes
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer.

    Raises:
        LoadError: The server answered with an error.
    """
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(url, data=payload, headers=headers) as reply:
            if reply.status != 200:
                raise LoadError(f"{url} answers {reply.status}: {await reply.text()}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                event: dict[str, Any] = json.loads(line.removeprefix(b"data:"))
                if "error" in event:
                    raise LoadError(f"{url} answers {event['error']}")
                yield event
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError(
            f"{url} doesn't answer ({error!r}); its server's log may say why"
        ) from error


def open_loop(
    url: str, bodies: Sequence[dict[str, Any]], due_s: Sequence[float], ask: Ask = ask_generate
) -> Run:
    """Send each request when it is due, whatever became of those before it.

    Raises:
        LoadError: The server answered one with an error.
    """
    return asyncio.run(_drive(url, bodies, due_s, len(bodies), ask))


def closed_loop(
    url: str, bodies: Sequence[dict[str, Any]], concurrency: int, ask: Ask = ask_generate
) -> Run:
    """Keep `concurrency` requests under way until all have been sent.

    Raises:
        LoadError: The server answered one with an error.
    """
    return asyncio.run(_drive(url, bodies, None, concurrency, ask))


async def _drive(
    url: str,
    bodies: Sequence[dict[str, Any]],
    due_s: Sequence[float] | None,
    concurrency: int,
    ask: Ask,
) -> Run:
    # Made before the clock starts: a long prompt takes a millisecond.
    payloads = [json.dumps({**body, "stream": True}).encode() for body in bodies]
    slots = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        started = time.perf_counter()
        lags_s: list[float] = []
        probe = asyncio.create_task(_probe(lags_s))

        async def one(number: int) -> tuple[float, Outcome]:
            if due_s is not None:
                await asyncio.sleep(started + due_s[number] - time.perf_counter())
            async with slots:
                due = time.perf_counter() if due_s is None else started + due_s[number]
                return due - started, await ask(session, url, payloads[number], due)

        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(one(number)) for number in range(len(bodies))]
        except* LoadError as failures:
            raise failures.exceptions[0] from None
        finally:
            probe.cancel()
        seconds = time.perf_counter() - started
    due, outcomes = zip(*(task.result() for task in asked), strict=True)
    return Run(outcomes, due, seconds, statistics.fmean(lags_s) if lags_s else None)


async def _probe(lags_s: list[float]) -> None:
    """Note how late the event loop is, until cancelled."""
    while True:
        started = time.perf_counter()
        await asyncio.sleep(PROBE_S)
        lags_s.append(time.perf_counter() - started - PROBE_S)
