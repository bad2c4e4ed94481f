"""Warming: documents are computed in the background before anybody asks for them.

Each document is sent as a speculation of the server's own, behind the prefix that prompts begin
with, one after the other in the given order. So warming stands behind all traffic: the schedulers
refuse a speculation while requests wait and end one that is in the way, and it is tried again
later. It counts as no retrieval, so what nobody asks for afterwards is the first to leave.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rag_radix.control.client import Client
from rag_radix.control.selector import parse_object
from rag_radix.errors import ControlError, RefusedError
from rag_radix.wire import KEY, MAX_NAME_CHARS

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20
MAX_DOCUMENTS = 100_000
FIELDS = ("prefix", "documents", "tokens_per_s", "cache_salt", "extra_key", "salt_from")
DEFAULT_TOKENS_PER_S = 10_000.0
# After a refusal, doubled up to the longest.
_SHORTEST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
# Whether the server is up, and that it isn't yet: a large model takes minutes to load.
_ASK_EVERY_S = 1.0
_TELL_EVERY_S = 300.0

Prompt = str | list[int]
Generate = Callable[[dict[str, Any]], Awaitable[int]]
"""Takes a body of `/generate`, returns the tokens of its prompt. Raises `Busy` when requests are in
its way or it was aborted, and ValueError when it is wrong."""


class Busy(Exception):
    """The server has other things to do."""


@dataclass(frozen=True, slots=True)
class WarmDocument:
    """A document as it stands in prompts: its text, or its tokens."""

    id: str
    version: str
    content: Prompt


@dataclass(frozen=True, slots=True)
class WarmOrder:
    """What is to be warmed.

    Attributes:
        prefix: What prompts begin with, as they have it: text, or tokens.
        documents: In the order in which they are computed.
        tokens_per_s: How much at most, prefixes included.
        cache_salt, extra_key: Of the requests that are to find them.
        salt_from: 0 where the salt covers the documents and not the prefix.
    """

    prefix: Prompt
    documents: tuple[WarmDocument, ...]
    tokens_per_s: float = DEFAULT_TOKENS_PER_S
    cache_salt: str | None = None
    extra_key: str | None = None
    salt_from: int | None = None


@dataclass(slots=True)
class Progress:
    """How far warming has come.

    Attributes:
        state: "idle", "running", "done" or "stopped".
        documents: How many were ordered.
        warmed: How many are computed.
        failed: How many the server couldn't take, such as those beyond its context.
        tokens: Tokens of the prompts sent, cached ones included.
        refusals: Times that requests were in the way, or everything was aborted.
        problem: The last failure, or what has stopped it.
    """

    state: str = "idle"
    documents: int = 0
    warmed: int = 0
    failed: int = 0
    tokens: int = 0
    refusals: int = 0
    problem: str | None = None


def parse_order(body: Mapping[str, Any]) -> WarmOrder:
    """Read `{"prefix": ..., "documents": [{"id", "version", "text" or "tokens"}], "tokens_per_s",
    "cache_salt", "extra_key", "salt_from"}`.

    Raises:
        ControlError: Something is malformed; the message names it.
    """
    prefix = body.get("prefix", "")
    if not (isinstance(prefix, str) or _is_tokens(prefix)):
        raise ControlError('"prefix" must be a text or an array of token ids')
    items = body.get("documents")
    if not isinstance(items, list) or not 0 < len(items) <= MAX_DOCUMENTS:
        raise ControlError(f'"documents" must be an array of 1 to {MAX_DOCUMENTS:,} documents')
    documents = tuple(_document(item, index) for index, item in enumerate(items))
    kind = type(prefix if prefix else documents[0].content)
    if any(type(document.content) is not kind for document in documents):
        raise ControlError("give the prefix and all documents as text, or all of them as tokens")
    rate = body.get("tokens_per_s", DEFAULT_TOKENS_PER_S)
    if type(rate) not in (int, float) or not 0 < rate < 1e9:
        raise ControlError(f'"tokens_per_s" must be a number above 0, not {rate!r:.40}')
    salt, key = body.get("cache_salt"), body.get("extra_key")
    for name, value in (("cache_salt", salt), ("extra_key", key)):
        if value is not None and not isinstance(value, str):
            raise ControlError(f'"{name}" must be a string, not {value!r:.40}')
    salt_from = body.get("salt_from")
    if salt_from is not None and not (type(salt_from) is int and salt_from == 0 and salt):
        raise ControlError('"salt_from" must be 0, beside a "cache_salt", or null')
    return WarmOrder(
        prefix if prefix else kind(), documents, float(rate), salt or None, key or None, salt_from
    )


def _document(item: Any, index: int) -> WarmDocument:
    where = f"documents[{index}]"
    if not isinstance(item, dict) or set(item) - {"id", "version", "text", "tokens"}:
        raise ControlError(f"{where} must be an object of id, version, and text or tokens")
    for name in ("id", "version"):
        value = item.get(name, "" if name == "version" else None)
        if (
            not isinstance(value, str)
            or len(value) > MAX_NAME_CHARS
            or (name == "id" and not value)
        ):
            raise ControlError(
                f"{where}.{name} must be a string of up to {MAX_NAME_CHARS} characters"
            )
    text, tokens = item.get("text"), item.get("tokens")
    if (text is None) == (tokens is None):
        raise ControlError(f"{where} needs either text or tokens")
    if text is not None and not (isinstance(text, str) and text.strip()):
        raise ControlError(f"{where}.text must be a text with more than white space")
    if tokens is not None and not (_is_tokens(tokens) and tokens):
        raise ControlError(f"{where}.tokens must be an array of token ids")
    content: Prompt = item["tokens" if text is None else "text"]
    return WarmDocument(item["id"], item.get("version", ""), content)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def request_body(order: WarmOrder, document: WarmDocument) -> dict[str, Any]:
    """The body of `/generate` that computes `document` behind the prefix of `order`."""
    prefix = order.prefix
    start = len(prefix)
    text = isinstance(document.content, str)
    span = {"id": document.id, "version": document.version}
    span |= {"start": start, "end": start + len(document.content)}  # type: ignore[dict-item]
    return {
        "text" if text else "input_ids": prefix + document.content,  # type: ignore[operator]
        "cache_salt": order.cache_salt,
        "extra_key": order.extra_key,
        "sampling_params": {
            "max_new_tokens": 1,
            "temperature": 0,
            "custom_params": {
                KEY: {
                    "documents": [span],
                    "unit": "char" if text else "token",
                    "speculative": True,
                    "salt_from": order.salt_from,
                }
            },
        },
    }


class Warming:
    """The one order that is being carried out, if there is one.

    Attributes:
        progress: Of it, or of the last one.
    """

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._task: asyncio.Task[None] | None = None
        self.progress = Progress()

    def start(self, order: WarmOrder) -> None:
        """Carry out `order` in the background.

        Raises:
            RefusedError: Another one is being carried out.
        """
        if self._task is not None and not self._task.done():
            raise RefusedError("documents are being warmed: wait for its end, or stop it")
        self.progress = Progress("running", len(order.documents))
        self._task = asyncio.create_task(self._run(order, self.progress))

    def stop(self) -> None:
        """Leave the rest of the documents."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self.progress.state = "stopped"

    async def _run(self, order: WarmOrder, progress: Progress) -> None:
        try:
            for document in order.documents:
                await self._warm(order, document, progress)
        except Exception as error:
            progress.state = "stopped"
            progress.problem = f"{type(error).__name__}: {error}"
            logger.exception("Control: warming has stopped")
            return
        progress.state = "done"
        logger.info("Control: warmed %d of %d documents", progress.warmed, progress.documents)

    async def _warm(self, order: WarmOrder, document: WarmDocument, progress: Progress) -> None:
        wait_s = _SHORTEST_WAIT_S
        while True:
            try:
                tokens = await self._generate(request_body(order, document))
            except Busy:
                progress.refusals += 1
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            except ValueError as error:
                progress.failed += 1
                progress.problem = f"{document.id!r}: {error}"
                return
            progress.warmed += 1
            progress.tokens += tokens
            await asyncio.sleep(tokens / order.tokens_per_s)
            return


def at_start(server_args: Any) -> None:
    """Carry out the order that the setting `warm` names, once the server is up; to be called in the
    one process of a server that starts the others.

    Raises:
        ControlError: There is none in the file.
    """
    path = (server_args.radix_eviction_policy_config or {}).get("warm")
    if path is None:
        return
    try:
        body = Path(path).read_bytes()
    except OSError as error:
        raise ControlError(f"warm={path!r}: {error}") from None
    value = parse_object(body, FIELDS)
    parse_order(value)
    key = server_args.admin_api_key or server_args.api_key
    client = Client(server_args.url(), key, _own_tls(server_args))
    threading.Thread(target=_send, args=(client, value), daemon=True).start()


def _own_tls(server_args: Any) -> ssl.SSLContext | None:
    """What SGLang asks of the server's certificate where it calls itself."""
    from sglang.srt.arg_groups.serving_hook import ssl_verify_of

    asked = ssl_verify_of(server_args)
    if asked is True:
        return None
    if asked is not False:
        return ssl.create_default_context(cafile=asked)
    nothing = ssl.create_default_context()
    nothing.check_hostname, nothing.verify_mode = False, ssl.CERT_NONE
    return nothing


def _send(client: Client, order: dict[str, Any]) -> None:
    tell_at_s = time.monotonic() + _TELL_EVERY_S
    while (problem := client.why_down()) is not None:
        if time.monotonic() >= tell_at_s:
            tell_at_s += _TELL_EVERY_S
            logger.warning("Control: warming waits for %s to answer: %s", client.url, problem)
        time.sleep(_ASK_EVERY_S)
    try:
        client.post("/rag/warm", order)
    except ControlError as error:
        logger.error("Control: documents aren't warmed: %s", error)


def generator(manager: Callable[[], Any]) -> Generate:
    """Sends what is to be warmed through the tokenizer manager that `manager` finds."""

    async def generate(body: dict[str, Any]) -> int:
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        answer: dict[str, Any] = {}
        try:
            async for reply in manager().generate_request(GenerateReqInput(**body)):
                answer = reply["meta_info"]
        except HTTPException as error:
            if error.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                raise Busy from None
            raise ValueError(str(error.detail)) from None
        # Somebody has aborted all requests: whether this one was computed isn't known.
        if answer["finish_reason"]["type"] == "abort":
            raise Busy
        return int(answer["prompt_tokens"])

    return generate
