"""The requests of states for `/generate`: their ids, their annotations, and their attempts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rag_radix_frontend.connections import Connections
from rag_radix_frontend.errors import RequestError
from rag_radix_frontend.in_flight import InFlight
from rag_radix_frontend.replies import check_result, checked, events
from rag_radix_frontend.retries import Attempts, Retries, is_transient
from rag_radix_frontend.routing import routing_headers
from rag_radix_frontend.stream_progress import StreamProgress, TokenPrompt
from rag_radix_frontend.wire import placed_annotation
from rag_radix_frontend.workers import WORKERS

# For what a server answers without computing anything.
_TIMEOUT_S = 60.0


class Sender:
    """Sends what states ask of `/generate`, and again what breaks off, unless it is a guess.

    Each attempt has ids of its own, and those of the one before are aborted, so a request has one
    answer at most.
    """

    def __init__(
        self,
        base_url: str,
        connections: Connections,
        in_flight: InFlight,
        *,
        abort: Callable[[str], None],
        retries: Retries,
        strict: bool,
        cache_salt: str | None,
        routing_documents: int,
    ) -> None:
        self._url = base_url + "/generate"
        self._connections = connections
        self._in_flight = in_flight
        self._abort = abort
        self._retries = retries
        self._strict = strict
        self._cache_salt = cache_salt
        self._routing_documents = routing_documents

    def whole(self, state: Any, data: dict[str, Any], *, counts: bool = True) -> Any:
        """The answer to a request, which `counts` if it is a retrieval of its own.

        Raises:
            RequestError: the server refused it, or gave none (`ConnectionLost`).
        """
        attempts = self._attempts(state)
        while True:
            try:
                return self.once(state, dict(data), counts=counts)
            except Exception as error:
                self._failed(state, attempts, error)

    def streamed(
        self, state: Any, data: dict[str, Any], *, counts: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """The pieces of an answer as they come, each with the server's account so far.

        Raises:
            RequestError: as of a whole one.
        """
        progress, attempts = StreamProgress(data), self._attempts(state)
        tokens = _Tokens(self, state, data)
        while not progress.is_finished:
            try:
                request = progress.next_request(tokens)
                # What the program has seen something of has been counted.
                sending = self._sending(state, request, counts and not progress.text)
                with sending, self._stream(state, request) as reply:
                    for event in events(reply):
                        check_result(event)
                        yield progress.add(event)
                return
            except Exception as error:
                if progress.is_finished:  # only the end of the stream was lost
                    return
                may_go_on = self._retries.continues or not progress.text
                if not may_go_on and is_transient(error):
                    raise attempts.broken_off(error, len(progress.text)) from error
                self._failed(state, attempts, error)

    def once(self, state: Any, data: dict[str, Any], *, counts: bool = True) -> Any:
        """The answer to a request that is sent once."""
        with self._sending(state, data, counts):
            result = self._reply(state, data).json()
            for one in result if isinstance(result, list) else [result]:
                check_result(one)
        return result

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of some tokens; None where the server, a router perhaps, doesn't say."""
        told = self._told("/detokenize", {"tokens": list(ids)})
        return None if told is None else str(told["text"])

    def placed(self, text: str) -> TokenPrompt | None:
        """A prompt in tokens, with its documents where they are among these; None where it has
        none, or where the server, not one of ours perhaps, doesn't say."""
        salt = self._cache_salt
        params = placed_annotation(text, strict=self._strict, salted=bool(salt), counts=False)
        if params is None or not params["rag"]["documents"]:
            return None
        asked = {"text": text, "rag": params["rag"], **({"cache_salt": salt} if salt else {})}
        placed = self._told("/rag/place", asked)
        return None if placed is None else TokenPrompt(placed["input_ids"], {"rag": placed["rag"]})

    def _told(self, route: str, body: dict[str, Any]) -> Any:
        """What the server says; None where it refuses, as one does that hasn't the route."""
        try:
            reply = checked(self._connections.request(route, body, timeout_s=_TIMEOUT_S))
        except RequestError as error:
            if is_transient(error):
                raise
            return None
        return reply.json()

    def _attempts(self, state: Any) -> Attempts:
        return Attempts(self._retries, self._url, partial(self._in_flight.pause, state))

    def _failed(self, state: Any, attempts: Attempts, error: Exception) -> None:
        """Returns when another attempt is due, or raises."""
        if attempts.costs_nothing(error):
            return
        if self._in_flight.is_speculative(state):
            raise error
        attempts.failed(error)

    @contextlib.contextmanager
    def _sending(self, state: Any, data: dict[str, Any], counts: bool) -> Iterator[None]:
        """Give a request its ids and annotations, and count it as running meanwhile."""
        batch = data.get("text", data.get("input_ids"))
        count = len(batch) if isinstance(batch, list) and not isinstance(batch[0], int) else None
        with self._in_flight.sending(state, count or 1) as ticket:
            data["rid"] = ticket.rids[0] if count is None else ticket.rids
            annotate(data, self._strict, ticket.speculative, self._cache_salt, counts=counts)
            try:
                yield
            except Exception as error:
                # The server, maybe behind a gateway that has given up, may not know that nobody
                # waits for it any longer.
                if is_transient(error) and not isinstance(error, ConnectionRefusedError):
                    WORKERS.start(partial(self._give_up, ticket.rids))
                raise

    def _give_up(self, rids: list[str]) -> None:
        with contextlib.suppress(Exception):
            for rid in rids:
                self._abort(rid)

    def _stream(self, state: Any, data: dict[str, Any]) -> contextlib.closing[Any]:
        return contextlib.closing(self._reply(state, data))

    def _reply(self, state: Any, data: dict[str, Any]) -> Any:
        return checked(
            self._connections.request(
                "/generate",
                data,
                stream=data.get("stream", False),
                timeout_s=self._retries.silence_s,
                once=True,
                headers=routing_headers(state.text_, self._routing_documents),
            )
        )


class _Tokens:
    """What the server tells of the tokens of a state's request."""

    def __init__(self, sender: Sender, state: Any, data: dict[str, Any]) -> None:
        self._sender, self._state, self._prompt = sender, state, data["text"]
        self.decode = sender.decode

    def prompt(self) -> TokenPrompt | None:
        if (placed := self._sender.placed(self._prompt)) is not None:
            return placed
        # The server computes and keeps the prompt by the way.
        params = {"max_new_tokens": 0}
        data = {"text": self._prompt, "sampling_params": params, "return_prompt_token_ids": True}
        reply = self._sender.once(self._state, data, counts=False)
        ids: list[int] | None = reply.get("prompt_token_ids")
        return None if ids is None else TokenPrompt(ids)


def annotate(
    data: dict[str, Any],
    strict: bool,
    speculative: bool,
    cache_salt: str | None,
    *,
    counts: bool = True,
) -> None:
    """Have a request say where its documents are, whether it is a guess, whose it is, and whether
    it `counts` as a retrieval of its own."""
    text, params = data.get("text"), data["sampling_params"]
    if cache_salt:
        data["cache_salt"] = cache_salt
    if text is None and "custom_params" in params:
        return  # the server has placed them
    texts = text if isinstance(text, list) else [text]
    annotations = [
        placed_annotation(
            one, strict=strict, speculative=speculative, salted=bool(cache_salt), counts=counts
        )
        for one in texts
    ]
    if not any(annotations):
        params.pop("custom_params", None)  # of an earlier attempt, as a guess
        return
    if isinstance(text, list):
        data["sampling_params"] = [{**params, "custom_params": one} for one in annotations]
    else:
        params["custom_params"] = annotations[0]
