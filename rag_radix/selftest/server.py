"""The server being tested, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rag_radix.profile.server import ProfiledServer
from rag_radix.selftest.prompts import Prompt

OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer.

    Attributes:
        tokens: Output tokens.
        gaps: For each, how far its log-probability was above the second best one.
        device_hit: Prompt tokens found on the device.
        host_hit: Prompt tokens loaded back from host.
    """

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    device_hit: int
    host_hit: int


class TestedServer(ProfiledServer):
    """A server whose answers are compared; raises `ProfileError` as its base does."""

    __test__ = False  # for pytest

    def text(self) -> list[int]:
        """Token ids of a long text."""
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))[:100_000]
        body = {"prompt": text, "add_special_tokens": False}
        tokens: list[int] = self._call("/tokenize", body)["tokens"]
        return tokens

    def answer(self, prompt: Prompt, namespace: str) -> Answer:
        """Ask; only prompts of one namespace share what is cached."""
        documents = [{"id": n, "start": start, "end": end} for n, start, end in prompt.documents]
        body = {
            "input_ids": list(prompt.tokens),
            "extra_key": namespace,
            "return_logprob": True,
            "top_logprobs_num": 2,
            "logprob_start_len": -1,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "custom_params": {"rag": {"documents": documents, "unit": "token"}},
            },
        }
        return _answer(self._call("/generate", body)["meta_info"])

    def compute(self, prompt: Sequence[int], namespace: str) -> None:
        """Have a prompt in the cache that is a document as a whole."""
        self.prefill(prompt, namespace, document_tokens=len(prompt) - 1)


def _answer(meta: dict[str, Any]) -> Answer:
    details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"], "host": 0}
    return Answer(
        tuple(token for _, token, _ in meta["output_token_logprobs"]),
        tuple(first[0] - second[0] for first, second, *_ in meta["output_top_logprobs"]),
        details["device"],
        details["host"],
    )
