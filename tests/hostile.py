"""Random and hostile requests, the same ones for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

VOCABULARY = 49152

# Valid names, however they look.
NAMES = [
    "wiki/17",
    "../../../etc/passwd",
    "..\\..\\windows",
    "/dev/null",
    "a\nb\r\nControl: {}",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202eleft to right\u2066",
    "\x00\x01\x7f\x85",
    "'; DROP TABLE documents; --",
    "{{7*7}} ${jndi:ldap://x} %s %n %(name)s",
    "<script>alert(1)</script>",
    "e\u0301" * 40,
    "\U0001f642" * 100,
    "x" * 512,
    " ",
    "\ufeff\u200b",
    "constructor",
    "__proto__",
]

JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31 - 1,
    2**63,
    -(2**63),
    10**40,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "token",
    "char",
    "\ud800",
    "x" * 513,
    "x" * 20_000,
    [],
    {},
    [[]],
    [{}],
    {"rag": {}},
    {"id": "a"},
    [None] * 50,
    {"__sglang_": 1},
]


class Call(NamedTuple):
    """One request.

    Attributes:
        path: With its query.
        body: Of a POST; None for a GET.
    """

    path: str
    body: bytes | None


def requests(count: int, seed: int) -> Iterator[Call]:
    """`count` of them: two thirds with an annotation, others to the routes of operators and
    programs, and some that are no JSON."""
    rng = random.Random(seed)
    for _ in range(count):
        kind = rng.random()
        if kind < 0.67:
            path, body = _annotated(rng)
            yield Call(path, dumped(body))
        elif kind < 0.82:
            yield _control(rng)
        elif kind < 0.92:
            path, body = _annotated(rng)
            yield Call(path, _damaged(rng, dumped(body)))
        else:
            yield Call(rng.choice(_QUERIES).format(rng.choice(_VALUES)), None)


def generate_bodies(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Bodies of `/generate`."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _native(rng)


def dumped(body: Any) -> bytes:
    """As JSON, lone surrogates and numbers that JSON doesn't have included."""
    return json.dumps(body).encode()


def _annotated(rng: random.Random) -> tuple[str, Any]:
    path = rng.choice(["/generate"] * 6 + ["/v1/completions", "/v1/chat/completions"])
    native = _native(rng)
    if path == "/generate":
        return path, native
    body: dict[str, Any] = {"model": "default", "max_tokens": 2, "temperature": 0}
    body["custom_params"] = native["sampling_params"].get("custom_params")
    for name in ("cache_salt", "stream"):
        if name in native:
            body[name] = native[name]
    prompt = native.get("text", native.get("input_ids"))
    if path == "/v1/completions":
        body["prompt"] = prompt
        return path, body
    text = prompt if isinstance(prompt, str) else "The cat sat. The dog barked."
    body["messages"] = [{"role": "user", "content": text}]
    if rng.random() < 0.6:
        documents: list[Any] = [
            {"id": _name(rng), "text": rng.choice([text, text[:9], "The cat", "elsewhere", " "])}
            for _ in range(rng.randrange(3))
        ]
        body["custom_params"] = {"rag": _mutated(rng, {"documents": documents}, 0.2)}
    return path, body


def _native(rng: random.Random) -> dict[str, Any]:
    length = rng.randrange(2, 200)
    body: dict[str, Any] = {}
    unit = rng.choice(["token", "token", "char"])
    if unit == "char":
        body["text"] = "".join(rng.choice("The cat sat 猫 é\n") for _ in range(length))
    else:
        head = [5] * min(length, 60)
        body["input_ids"] = head + [rng.randrange(VOCABULARY) for _ in range(length - len(head))]
    documents, at = [], 0
    while at < length - 1 and len(documents) < 6 and rng.random() < 0.8:
        start = rng.randrange(at, length)
        end = rng.randrange(start, length + 1)
        documents.append({"id": _name(rng), "start": start, "end": end})
        if rng.random() < 0.3:
            documents[-1]["version"] = rng.choice([*NAMES, ""])
        at = end
    rag: dict[str, Any] = {"documents": documents, "unit": unit}
    for name, values in (
        ("speculative", [True, False]),
        ("strict", [True, False]),
        ("salt_from", [0, 1, 2, None]),
    ):
        if rng.random() < 0.2:
            rag[name] = rng.choice(values)
    if rng.random() < 0.2:
        body["cache_salt"] = rng.choice([*NAMES, "tenant", ""])
    sampling: dict[str, Any] = {"max_new_tokens": rng.randrange(3), "temperature": 0}
    sampling["custom_params"] = {"rag": _mutated(rng, rag, 0.5)}
    body["sampling_params"] = sampling
    if rng.random() < 0.1:
        body["stream"] = True
    if rng.random() < 0.1:
        body["rid"] = rng.choice([*NAMES, "rid"]) + str(rng.random())
    if rng.random() < 0.1:
        sampling["custom_params"] = rng.choice(JUNK)
    if rng.random() < 0.15 and "input_ids" in body:
        body["input_ids"] = _wrong_ids(rng, body["input_ids"])
    return body


def _mutated(rng: random.Random, rag: Any, probability: float) -> Any:
    """Perhaps with something else in the place of one or more of its parts."""
    while rng.random() < probability:
        places: list[tuple[Any, Any]] = []
        stack: list[Any] = [rag]
        while stack:
            value = stack.pop()
            if isinstance(value, dict | list) and len(places) < 500:
                for key in value if isinstance(value, dict) else range(len(value)):
                    places.append((value, key))
                    stack.append(value[key])
        if not places or rng.random() < 0.05:
            return rng.choice(JUNK)
        container, key = rng.choice(places)
        change = rng.random()
        if change < 0.15:
            del container[key]
        elif change < 0.3 and isinstance(container, dict):
            container[rng.choice([*NAMES, "text", "ends"])] = rng.choice(JUNK)
        elif change < 0.35 and isinstance(container, list):
            container += (container * rng.choice([1, 1100]))[:1100]
        elif change < 0.4:
            nested: Any = container[key]
            for _ in range(rng.choice([1, 50, 200])):
                nested = [nested]
            container[key] = nested
        else:
            container[key] = rng.choice(JUNK)
        rag = json.loads(json.dumps(rag))  # no part of it twice
    return rag


def _wrong_ids(rng: random.Random, ids: list[int]) -> Any:
    ids = list(ids)
    change = rng.randrange(5)
    if change == 0:
        ids[rng.randrange(len(ids))] = rng.choice(
            [VOCABULARY, 2**31 - 1, 2**31, 2**63, -1, -(2**63)]
        )
        return ids
    if change == 1:
        return [*ids, rng.choice(JUNK)]
    if change == 2:
        return [ids, rng.choice([ids, [], [-1], [VOCABULARY], None])]
    if change == 3:
        return ids * 40
    return rng.choice(JUNK)


def _name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.5 else f"doc {rng.randrange(40)}"


def _control(rng: random.Random) -> Call:
    names = ["invalidate", "pin", "unpin", "warm", "promote", "order", "place"]
    path = "/rag/" + rng.choice(names)
    body: dict[str, Any] = {"id": _name(rng)}
    if path == "/rag/pin":
        body |= {"tier": rng.choice(["device", "host", "disk"]), "ttl_s": rng.choice([0.5, 1, 0])}
    elif path == "/rag/warm":
        documents = [{"id": _name(rng), "text": "A short text."} for _ in range(rng.randrange(3))]
        body = {"prefix": rng.choice(["", "Hi. ", [5]]), "documents": documents}
    elif path == "/rag/promote":
        body = {"rids": [_name(rng) for _ in range(rng.randrange(4))]}
    elif path == "/rag/order":
        body = {"text": "Hi. ", "documents": [_name(rng) for _ in range(rng.randrange(5))]}
        if rng.random() < 0.5:
            spans = [{"id": _name(rng), "start": 0, "end": rng.randrange(6)}]
            body["rag"] = {"documents": spans, "unit": "char", "salt_from": rng.choice([0, 1])}
    elif path == "/rag/place":
        spans = [{"id": _name(rng), "start": 0, "end": rng.randrange(9)}]
        body = {"text": "Hi, you.", "rag": {"documents": spans, "unit": "char"}}
    if rng.random() < 0.2:
        body["cache_salt"] = _name(rng)
    return Call(path, dumped(_mutated(rng, body, 0.4)))


def _damaged(rng: random.Random, body: bytes) -> bytes:
    """What is no JSON any more, mostly."""
    change = rng.randrange(5)
    if change == 0:
        return body[: rng.randrange(len(body))]
    if change == 1:
        at = rng.randrange(len(body))
        return body[:at] + rng.randbytes(4) + body[at:]
    if change == 2:
        return b"[" * rng.choice([3, 100_000])
    if change == 3:
        return b'{"rag": ' * 2_000
    return body + body


_QUERIES = [
    "/rag/documents?prefix={}",
    "/rag/documents?sort={}",
    "/rag/documents?offset={}&limit=3",
    "/rag/documents?limit={}",
    "/rag/documents?namespace={}",
    "/rag/documents?{}=1",
    "/rag/tree?depth={}",
    "/rag/tree?nodes={}",
    "/rag/pool?{}",
    "/rag/stats?{}",
    "/rag/pins?{}",
]
_VALUES = [
    "",
    "0",
    "1",
    "7",
    "-1",
    "1e9",
    "9" * 400,
    "..%2F..%2F",
    "%00",
    "%1b[31m",
    "%ff%fe",
    "wiki",
]
