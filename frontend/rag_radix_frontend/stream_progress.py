"""What has come of a streamed answer, and how another request goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rag_radix_frontend.errors import RequestError

# With these the server treats what it has generated otherwise than a prompt, so an answer can't
# go on as part of one.
_MADE_FOR_A_WHOLE = (
    "frequency_penalty",
    "presence_penalty",
    "stop_regex",
    "regex",
    "json_schema",
)
_HALF_A_CHARACTER = "\ufffd"


class _Mark(NamedTuple):
    """A place in an answer: behind so many tokens, which show so many characters."""

    tokens: int
    chars: int


_BEGINNING = _Mark(0, 0)


class StreamProgress:
    """A streamed answer, over all the requests that it takes.

    It goes on from its token ids, so it is the answer of an unbroken stream. It is taken up a
    little earlier where its last tokens are half a character, or where its text ends as a stop
    string begins: a server looks for those in what it generates itself.

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

    def obstacle(self) -> str | None:
        """What of the request keeps its answer from being taken up, if anything does."""
        params = self._data["sampling_params"]
        for name in _MADE_FOR_A_WHOLE:
            if params.get(name):
                return name
        return next((n for n in ("return_logprob", "image_data") if self._data.get(n)), None)

    def next_request(
        self, prompt_ids: Callable[[], Sequence[int]], decode: Callable[[Sequence[int]], str]
    ) -> dict[str, Any]:
        """The request that begins the answer, or takes it up.

        Args:
            prompt_ids: Asks the server for the tokens of the prompt.
            decode: Asks the server for the text of some tokens.
        """
        self._taken_up = self._last_settled(decode) if self.text else _BEGINNING
        del self._marks[1 + next(i for i, m in enumerate(self._marks) if m == self._taken_up) :]
        if not self.text:
            return self._data
        tokens = self._taken_up.tokens
        params = {k: v for k, v in self._data["sampling_params"].items() if k != "custom_params"}
        for name in ("max_new_tokens", "min_new_tokens"):
            if params.get(name):
                params[name] = max(0, params[name] - tokens)
        request = {name: value for name, value in self._data.items() if name != "text"}
        request["input_ids"] = [*prompt_ids(), *self._ids[:tokens]]
        request["sampling_params"] = params
        return request

    def _last_settled(self, decode: Callable[[Sequence[int]], str]) -> _Mark:
        params = self._data["sampling_params"]
        stops = params.get("stop") or ()
        most_chars = len(self.text) - _begun(
            self.text, [stops] if isinstance(stops, str) else stops
        )
        # The last token that is allowed is left to the next request, which then says so.
        most_tokens = (params.get("max_new_tokens") or len(self._ids) + 1) - 1
        for mark in reversed(self._marks):
            is_possible = mark.chars <= most_chars and mark.tokens <= most_tokens
            if mark == _BEGINNING or (is_possible and self._is_whole(mark, decode)):
                return mark
        raise AssertionError("the beginning is always among the marks")

    def _is_whole(self, mark: _Mark, decode: Callable[[Sequence[int]], str]) -> bool:
        return not decode(self._ids[: mark.tokens]).endswith(_HALF_A_CHARACTER)


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
