"""What has come of a streamed answer, and how another request goes on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rag_radix_frontend.errors import RequestError

# With these the server treats what it has generated otherwise than a prompt, so an answer can't
# be taken up in the middle.
_MADE_FOR_A_WHOLE = (
    "frequency_penalty",
    "presence_penalty",
    "stop_regex",
    "regex",
    "json_schema",
)
_HALF_A_CHARACTER = "\ufffd"


class TokenPrompt(NamedTuple):
    """A prompt in tokens, and the `custom_params` that say where its documents are among them."""

    ids: Sequence[int]
    custom_params: Mapping[str, Any] | None = None


class Tokens(Protocol):
    """Asks the server for tokens; None where it doesn't tell."""

    def prompt(self) -> TokenPrompt | None:
        """The prompt."""
        ...

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of some."""
        ...


class _Mark(NamedTuple):
    """A place in an answer: behind so many tokens, which show so many characters."""

    tokens: int
    chars: int


_BEGINNING = _Mark(0, 0)


class StreamProgress:
    """A streamed answer, over all the requests that it takes.

    It goes on from its token ids, so it is the answer of an unbroken stream. It is taken up a
    little earlier where its last tokens are half a character, or where its text ends as a stop
    string begins: a server looks for those in what it generates itself. Where the server doesn't
    tell the tokens, or the request is for an answer as a whole, it begins again, and what the
    program has got is left out.

    Attributes:
        text: What the program has got.
        is_finished: The server has said that there is no more.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        """`data` is the request."""
        self._data = data
        self.text = ""
        self.is_finished = False
        self._ids: list[int] = []
        self._marks = [_BEGINNING]
        # Where the request in progress has taken the answer up.
        self._taken_up = _BEGINNING

    def add(self, event: Mapping[str, Any]) -> tuple[str, Any]:
        """What an event brings: new text, and the server's account of the answer so far.

        Raises:
            RequestError: the answer goes on with another text than the program has got.
        """
        tokens, chars = self._taken_up
        text, meta_info = event["text"], event["meta_info"]
        ids = event.get("output_ids", [])
        if chars:
            text = self.text[:chars] + text
        if tokens:
            ids = self._ids[:tokens] + ids
            meta_info = {
                **meta_info,
                "prompt_tokens": meta_info["prompt_tokens"] - tokens,
                "completion_tokens": meta_info["completion_tokens"] + tokens,
                "finish_reason": _of_the_whole(meta_info.get("finish_reason"), tokens),
            }
        got = len(self.text)
        # It may be shorter: a stop string is cut off when it is complete.
        if text[:got] != self.text[: len(text)]:
            raise RequestError(
                f"the server went on with another text after {got} characters of the answer"
            )
        self._ids = ids
        self._marks.append(_Mark(len(ids), len(text)))
        self.is_finished = meta_info.get("finish_reason") is not None
        if len(text) > got:
            self.text = text
        return text[got:], meta_info

    def next_request(self, server: Tokens) -> dict[str, Any]:
        """The request that begins the answer, begins it again or takes it up."""
        later_part = self._later_part(server) if self.text and not self._is_whole() else None
        if later_part is None:
            self._take_up(_BEGINNING)
        return later_part or self._data

    def _later_part(self, server: Tokens) -> dict[str, Any] | None:
        mark = self._last_settled(server)
        prompt = server.prompt() if mark is not None else None
        if mark is None or prompt is None:
            return None
        self._take_up(mark)
        params = {k: v for k, v in self._data["sampling_params"].items() if k != "custom_params"}
        for name in ("max_new_tokens", "min_new_tokens"):
            if params.get(name):
                params[name] = max(0, params[name] - mark.tokens)
        request = {name: value for name, value in self._data.items() if name != "text"}
        request["input_ids"] = [*prompt.ids, *self._ids[: mark.tokens]]
        if prompt.custom_params is not None:
            params["custom_params"] = prompt.custom_params
        request["sampling_params"] = params
        return request

    def _take_up(self, mark: _Mark) -> None:
        self._taken_up = mark
        del self._marks[self._marks.index(mark) + 1 :]

    def _is_whole(self) -> bool:
        params = self._data["sampling_params"]
        return any(params.get(name) for name in _MADE_FOR_A_WHOLE) or any(
            self._data.get(name) for name in ("return_logprob", "image_data")
        )

    def _last_settled(self, server: Tokens) -> _Mark | None:
        params = self._data["sampling_params"]
        stops = params.get("stop") or ()
        most_chars = len(self.text) - _begun(
            self.text, [stops] if isinstance(stops, str) else stops
        )
        # The last token that is allowed is left to the next request, which then says so.
        most_tokens = (params.get("max_new_tokens") or len(self._ids) + 1) - 1
        for mark in reversed(self._marks[1:]):
            if mark.tokens and mark.chars <= most_chars and mark.tokens <= most_tokens:
                text = server.decode(self._ids[: mark.tokens])
                if text is None:
                    return None
                if not text.endswith(_HALF_A_CHARACTER):
                    return mark
        return None


def _of_the_whole(reason: Mapping[str, Any] | None, tokens: int) -> Mapping[str, Any] | None:
    """Why an answer has ended whose last request had `tokens` of it before."""
    if reason is None or "length" not in reason:
        return reason
    return {**reason, "length": reason["length"] + tokens}


def _begun(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    return max(
        (
            length
            for stop in stops
            for length in range(1, len(stop))
            if text.endswith(stop[:length])
        ),
        default=0,
    )
