"""The server being profiled, over HTTP."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_radix.errors import RagRadixError

REQUEST_LIMIT_S = 600.0
IDLE_LIMIT_S = 5.0
FLUSH_LIMIT_S = 10.0


class ProfileError(RagRadixError, RuntimeError):
    """The server can't be profiled; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a profile holds for, as the server states it.

    Attributes:
        model: Path or name the server was started with.
        device: Name of the accelerator, or "cpu".
        attention_backend: Of prefills.
    """

    model: str
    device: str
    sglang_version: str
    attention_backend: str
    page_size: int
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    tp_size: int
    chunked_prefill_tokens: int | None

    @classmethod
    def of(
        cls, arguments: Mapping[str, Any], accelerator: str | None, sglang_version: str
    ) -> Conditions:
        """From SGLang's arguments with what it made of them, which `/server_info` has, too."""
        chunk = arguments["chunked_prefill_size"]
        return cls(
            model=arguments["model_path"],
            device=accelerator or arguments["device"],
            sglang_version=sglang_version,
            attention_backend=arguments["prefill_attention_backend"]
            or arguments["attention_backend"],
            page_size=arguments["page_size"],
            dtype=arguments["dtype"],
            quantization=arguments["quantization"],
            kv_cache_dtype=arguments["kv_cache_dtype"],
            tp_size=arguments["tp_size"],
            chunked_prefill_tokens=chunk if chunk and chunk > 0 else None,
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of the server.

    Attributes:
        prompt_tokens: Length of the longest prompt it takes.
        device_tokens: Size of the device tier.
        has_host_tier: Whether prefixes that leave the device can go to host memory.
    """

    prompt_tokens: int
    device_tokens: int
    has_host_tier: bool


@dataclass(frozen=True, slots=True)
class Prefill:
    """How a prompt was computed.

    Attributes:
        seconds: From the request's arrival to its only output token, by the server's own
            clock (`meta_info.e2e_latency`). It holds what a hit saves and what it costs,
            scheduling and load-back included, and not the HTTP of the client.
        device_tokens: Found in the device tier.
        host_tokens: Loaded back from host memory.
    """

    seconds: float
    device_tokens: int
    host_tokens: int


class ProfiledServer:
    """An SGLang server, with or without the knowledge tree.

    All methods raise `ProfileError` where the server can't be reached or refuses.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def describe(self) -> tuple[Conditions, Capacity]:
        """Read what is served and how."""
        info = self._call("/server_info")
        accelerator = self._call("/v1/loads?include=core")["accelerator"]
        conditions = Conditions.of(info, accelerator, info["version"])
        # SGLang refuses prompts of `max_req_input_len` and more.
        capacity = Capacity(
            prompt_tokens=info["max_req_input_len"] - 1,
            device_tokens=info["max_total_num_tokens"],
            has_host_tier=info["enable_hierarchical_cache"],
        )
        return conditions, capacity

    def vocabulary(self) -> list[int]:
        """Some thousand token ids that the model certainly knows.

        SGLang runs whatever ids it is sent, and an unknown one ends the server; so they come
        from its own tokenizer.
        """
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))[:200_000]
        tokens = self._call("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return sorted(set(tokens))

    def prefill(self, tokens: Sequence[int], namespace: str, document_tokens: int = 0) -> Prefill:
        """Compute a prompt.

        Args:
            tokens: The prompt.
            namespace: Only prompts of the same one share cached prefixes.
            document_tokens: Length of the document that the prompt begins with, if any. The
                knowledge tree keeps documents where it drops other text.
        """
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        if document_tokens:
            document = {"id": namespace, "start": 0, "end": document_tokens}
            sampling["custom_params"] = {"rag": {"documents": [document], "unit": "token"}}
        body = {"input_ids": list(tokens), "extra_key": namespace, "sampling_params": sampling}
        meta = self._call("/generate", body)["meta_info"]
        details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"], "host": 0}
        return Prefill(meta["e2e_latency"], details["device"], details["host"])

    def fill(self, prompts: Sequence[Sequence[int]], namespace: str) -> None:
        """Compute many prompts at once, to have them in the cache."""
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        body = {"input_ids": prompts, "extra_key": namespace, "sampling_params": sampling}
        self._call("/generate", body)

    def flush(self) -> None:
        """Empty the cache."""
        self._call(f"/flush_cache?timeout={FLUSH_LIMIT_S:g}", {})

    def wait_until_idle(self) -> None:
        """Return once nothing runs or waits.

        Raises:
            ProfileError: Others keep the server busy.
        """
        deadline_s = time.monotonic() + IDLE_LIMIT_S
        while True:
            loads = self._call("/v1/loads?include=core")["loads"]
            requests = sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
            if requests == 0:
                return
            if time.monotonic() > deadline_s:
                raise ProfileError(
                    f"{self.url} is busy with {requests} requests of others, which would spoil "
                    "every time measured: profile a server that nobody else uses"
                )
            time.sleep(0.05)

    def _call(self, path: str, body: object = None) -> Any:
        """GET, or POST where there is a body; the reply parsed as JSON where it is JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:300]
            raise ProfileError(
                f"{self.url}{path} answers {error.code} {error.reason}: {detail}"
            ) from error
        except OSError as error:
            raise ProfileError(f"{self.url}{path} can't be reached: {error}") from error
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")
