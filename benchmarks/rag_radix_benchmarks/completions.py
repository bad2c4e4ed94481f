"""A peer in a comparison: any server of the OpenAI completions interface.

Its sizes can't be read, so they are what its operator says they are. The cache is emptied by
vLLM's `/reset_prefix_cache` (there with VLLM_SERVER_DEV_MODE=1) or SGLang's `/flush_cache`; hits
are known where the server counts them (vLLM: --enable-prompt-tokens-details, SGLang:
--enable-cache-report).
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from rag_radix_benchmarks.facts import Counters, ServerFacts, WrongArmError, get_json
from rag_radix_benchmarks.load import LoadError, Outcome, Run, closed_loop, events, open_loop

RESETS = ("/reset_prefix_cache", "/flush_cache?timeout=10")
RESET_LIMIT_S = 30.0


@dataclass(frozen=True)
class CompletionServer:
    """A running server, asked through `/v1/completions`."""

    url: str
    facts: ServerFacts

    @classmethod
    def at(cls, url: str) -> CompletionServer:
        """Ask what it serves.

        Raises:
            WrongArmError: It has no such interface.
        """
        model = get_json(f"{url}/v1/models")["data"][0]["id"]
        return cls(url, ServerFacts(model, attention_backend="", built={}))

    def empty(self) -> None:
        """Empty the cache.

        Raises:
            WrongArmError: It can't be.
        """
        for path in RESETS:
            try:
                request = urllib.request.Request(self.url + path, method="POST")
                urllib.request.urlopen(request, timeout=RESET_LIMIT_S).close()
                return
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise WrongArmError(f"{self.url}{path} answers {error}") from error
        raise WrongArmError(
            f"the cache of {self.url} can't be emptied between runs: it has none of "
            f"{', '.join(RESETS)}; start vLLM with VLLM_SERVER_DEV_MODE=1"
        )

    def open_loop(self, bodies: Sequence[dict[str, Any]], due_s: Sequence[float]) -> Run:
        return open_loop(self.url, self._converted(bodies), due_s, ask_completion)

    def closed_loop(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> Run:
        return closed_loop(self.url, self._converted(bodies), concurrency, ask_completion)

    def counters(self) -> Counters:
        """A peer counts nothing that could be read everywhere."""
        return Counters(scheduling_parts_s=None, moved_bytes=None, tree=None)

    def _converted(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [completion_body(body, self.facts.model) for body in bodies]


def completion_body(body: dict[str, Any], model: str) -> dict[str, Any]:
    """The same request as a `/generate` body, in the OpenAI interface."""
    sampling = body["sampling_params"]
    converted = {
        "model": model,
        "prompt": body["input_ids"],
        "max_tokens": sampling["max_new_tokens"],
        "temperature": sampling["temperature"],
        "ignore_eos": sampling["ignore_eos"],
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if body["extra_key"] is not None:
        converted["cache_salt"] = body["extra_key"]
    return converted


async def ask_completion(
    session: aiohttp.ClientSession, url: str, payload: bytes, due: float
) -> Outcome:
    """Ask `/v1/completions`.

    Raises:
        LoadError: The server answered with an error, or doesn't count tokens.
    """
    late_s = time.perf_counter() - due
    first_s, last_s, usage = None, 0.0, None
    output_ids: list[int] = []
    async for event in events(session, f"{url}/v1/completions", payload):
        usage = event.get("usage") or usage
        if event["choices"]:
            last_s = time.perf_counter() - due
            first_s = last_s if first_s is None else first_s
            output_ids += event["choices"][0].get("token_ids") or []
    if first_s is None or usage is None:
        raise LoadError(f"{url}/v1/completions answered without text or without usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Outcome(
        ttft_s=first_s,
        latency_s=last_s,
        late_s=late_s,
        prompt_tokens=usage["prompt_tokens"],
        device_tokens=cached or 0,
        host_tokens=0,
        output_tokens=usage["completion_tokens"],
        output_ids=tuple(output_ids),
        hits_counted=cached is not None,
    )
