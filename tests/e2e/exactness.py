"""Prompts over shared documents, the answers they must get, and how to ask for them."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from e2e.cpu_server import Server
from transformers import AutoTokenizer

MODEL = Path(__file__).parents[2] / ".cache" / "models" / "SmolLM2-135M-Instruct"
OUTPUT_TOKENS = 6
# bf16 keeps 8 bits, and a cached prefix changes the order of additions: SmolLM2's
# log-probabilities move by up to 0.25, so two within twice that may swap.
BF16_MARGIN = 0.5


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids with its document spans."""

    tokens: tuple[int, ...]
    documents: tuple[tuple[str, int, int], ...]

    def body(self, output_tokens: int = OUTPUT_TOKENS, **fields: Any) -> dict[str, Any]:
        """A greedy `/generate` request."""
        documents = [{"id": n, "start": s, "end": e} for n, s, e in self.documents]
        sampling = {
            "temperature": 0,
            "max_new_tokens": output_tokens,
            "ignore_eos": True,
            "custom_params": {"rag": {"documents": documents, "unit": "token"}},
        }
        return {"input_ids": list(self.tokens), "sampling_params": sampling, **fields}


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    device_hit: int
    host_hit: int
    storage_hit: int


def make_prompts(count: int, *, page_size: int, chunk_tokens: int, seed: int = 7) -> list[Prompt]:
    """Prompts of 1 to 5 documents out of 14, with shared prefixes and partial overlaps, and
    with lengths one below, at and one above multiples of page and chunk."""
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    names = sorted(topics)
    texts = [tokenizer(topics[name], add_special_tokens=False).input_ids for name in names]
    pool = [ids for ids in texts if len(ids) > 260][:14]
    # Sizes around pages, so that boundaries fall before, on and after them.
    offsets = [0, 1, -1, 5, 0, 7, -1] * 2
    sizes = [page_size * (2 + i // 2) + offset for i, offset in enumerate(offsets)]
    documents = [ids[:size] for ids, size in zip(pool, sizes, strict=True)]
    system = tokenizer("Answer from these passages.\n\n", add_special_tokens=False).input_ids
    prompts = []
    for index in range(count):
        if index and rng.random() < 0.4:  # a prefix of an earlier prompt's documents, or all
            earlier = rng.choice(prompts).documents
            chosen = [int(n) for n, _, _ in earlier[: rng.randint(1, len(earlier))]]
        else:
            chosen = []
        rest = [d for d in range(len(documents)) if d not in chosen]
        more = rng.randint(0 if chosen else 1, max(5 - len(chosen), 1))
        chosen += rng.sample(rest, more)
        chosen = chosen[:5]
        tokens, spans = list(system), []
        for document in chosen:
            spans.append((str(document), len(tokens), len(tokens) + len(documents[document])))
            tokens += documents[document]
        question = tokenizer(
            f"\nQuestion {index}: what does the passage say about {names[index]}?\nAnswer:",
            add_special_tokens=False,
        ).input_ids
        tokens += question
        unit = (page_size, chunk_tokens)[index % 2]
        wanted = (len(tokens) // unit + 1) * unit + (-1, 0, 1)[index % 3]
        if index % 4 < 2 and wanted - len(tokens) <= 64:
            tokens += [question[i % len(question)] for i in range(wanted - len(tokens))]
        prompts.append(Prompt(tuple(tokens), tuple(spans)))
    return prompts


def ask(server: Server, prompt: Prompt, **fields: Any) -> Answer:
    reply = server.generate(**prompt.body(**fields))
    details = reply["meta_info"].get("cached_tokens_details") or {}
    hits = (details.get(tier, 0) for tier in ("device", "host", "storage"))
    return Answer(tuple(reply["output_ids"]), *hits)


def ask_all(server: Server, prompts: Sequence[Prompt], *, concurrency: int) -> list[Answer]:
    if concurrency == 1:
        return [ask(server, prompt) for prompt in prompts]
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt), prompts))


@dataclass(frozen=True)
class Reference:
    """What stock SGLang answers with caching off.

    Attributes:
        tokens: Greedy output tokens.
        gaps: For each, how far its log-probability was above the second best one.
    """

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


def reference(server: Server, prompt: Prompt) -> Reference:
    body = prompt.body(return_logprob=True, top_logprobs_num=2, logprob_start_len=-1)
    del body["sampling_params"]["custom_params"]
    return reference_of(server.generate(**body)["meta_info"])


def reference_of(meta_info: Mapping[str, Any]) -> Reference:
    """The reference that an answer with its two best log-probabilities for each token is."""
    return Reference(
        tuple(token for _, token, _ in meta_info["output_token_logprobs"]),
        tuple(first[0] - second[0] for first, second in meta_info["output_top_logprobs"]),
    )


def differs(answer: Sequence[int], expected: Reference, *, margin: float = 0.0) -> str | None:
    """What is wrong with `answer`, or None.

    A token may differ only where the reference's two best were within `margin`; what follows
    it is another text and can't be compared.
    """
    for index, (got, wanted) in enumerate(zip(answer, expected.tokens, strict=False)):
        if got != wanted:
            gap = expected.gaps[index]
            return None if gap < margin else f"token {index}: {got}, not {wanted} (gap {gap:.4f})"
    return None


def stats(server: Server) -> dict[str, Any]:
    report: dict[str, Any] = server.get("/rag/stats")
    return report


def assert_intact(server: Server) -> dict[str, Any]:
    """The server lives, and its idle tree holds every slot once."""
    assert server.is_alive()
    report = stats(server)
    assert report["integrity"] == "ok"
    assert report["device"]["locked_tokens"] == 0
    swap = report["swap"]
    assert swap["most_copies_of_a_node"] <= 1 + swap["given_up_copies"]
    return report


def stream(server: Server, body: dict[str, Any]) -> Any:
    """Yields the events of a streaming `/generate`."""
    request = urllib.request.Request(
        server.url + "/generate",
        data=json.dumps({**body, "stream": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        for line in reply:
            event = line.decode().removeprefix("data: ").strip()
            if event and event != "[DONE]":
                yield json.loads(event)
