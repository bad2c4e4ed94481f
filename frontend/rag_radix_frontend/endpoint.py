"""The backend of SGLang programs that tells the server about documents and can cancel."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.global_config import global_config
from sglang.lang.interpreter import ProgramState, StreamExecutor
from sglang.lang.ir import SglSamplingParams
from sglang.utils import http_request

from rag_radix_frontend.errors import ArgumentError, RequestAborted, RequestError
from rag_radix_frontend.wire import placed_annotation

_LOGPROB_OPTIONS = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)
_CANCEL_RETRY_S = 0.1


@dataclass
class _Requests:
    """The requests a state has at the server, and whether it may send more."""

    rids: set[str] = field(default_factory=set)
    cancelled: bool = False


class RagEndpoint(RuntimeEndpoint):
    """`sgl.RuntimeEndpoint`, with three differences.

    - Every request whose text holds retrieved documents says where they are, `gen` and
      `select` alike. With `strict`, the server refuses those it can't place.
    - `cancel(state)` ends a program's requests.
    - What the server refuses raises `RequestError`, and `gen(n > 1)` returns a list.
    """

    carries_documents = True

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
        *,
        strict: bool = False,
    ) -> None:
        super().__init__(base_url, api_key, verify, chat_template_name)
        # SGLang's client assumes a route for it that its server doesn't have.
        self.support_concate_and_append = False
        self._strict = strict
        self._changed = threading.Condition()
        self._requests: weakref.WeakKeyDictionary[StreamExecutor, _Requests] = (
            weakref.WeakKeyDictionary()
        )

    def cancel(self, state: ProgramState) -> None:
        """End a program: its requests are aborted and it may send no more.

        The program gets `RequestAborted`. Returns when the server has let go of its requests.
        Forks are states of their own. A request for several samples (`n > 1`) can't be
        aborted; it ends first.
        """
        with self._changed:
            requests = self._requests.setdefault(state.stream_executor, _Requests())
            requests.cancelled = True
            while requests.rids:
                for rid in requests.rids:
                    self._post("/abort_request", {"rid": rid})
                # The server ignores a rid that it hasn't seen yet, so ask again.
                self._changed.wait(_CANCEL_RETRY_S)

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], Any]:
        result = self._generate_http_request(s, self._payload(s, sampling_params))
        if isinstance(result, list):
            return [sample["text"] for sample in result], [r["meta_info"] for r in result]
        return result["text"], result["meta_info"]

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Any]]:
        if sampling_params.n != 1:
            raise ArgumentError(f"a stream has one sample, so n must be 1, not {sampling_params.n}")
        data = {**self._payload(s, sampling_params), "stream": True}
        self._add_images(s, data)
        with self._sending(s, data), contextlib.closing(self._post("/generate", data)) as response:
            sent = 0
            for event in _events(response):
                _check_result(event)
                yield event["text"][sent:], event["meta_info"]
                sent = len(event["text"])

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        self._generate_http_request(s, {"text": s.text_, "sampling_params": {"max_new_tokens": 0}})

    def _payload(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> dict[str, Any]:
        self._handle_dtype_to_regex(sampling_params)
        options = {name: getattr(sampling_params, name) for name in _LOGPROB_OPTIONS}
        return {
            "text": s.text_,
            "sampling_params": {
                "skip_special_tokens": global_config.skip_special_tokens_in_output,
                "spaces_between_special_tokens": (
                    global_config.spaces_between_special_tokens_in_out
                ),
                **sampling_params.to_srt_kwargs(),
            },
            **{name: value for name, value in options.items() if value is not None},
        }

    # The base class's select() sends its requests through here.
    def _generate_http_request(self, s: StreamExecutor, data: dict[str, Any]) -> Any:
        self._add_images(s, data)
        with self._sending(s, data):
            result = self._post("/generate", data).json()
        for one in result if isinstance(result, list) else [result]:
            _check_result(one)
        return result

    @contextlib.contextmanager
    def _sending(self, s: StreamExecutor, data: dict[str, Any]) -> Iterator[None]:
        """Give a request its ids and annotations, and count it as running meanwhile."""
        _annotate(data, self._strict)
        batch = data.get("text", data.get("input_ids"))
        count = len(batch) if isinstance(batch, list) else 1
        rids = [uuid.uuid4().hex for _ in range(count)]
        data["rid"] = rids if isinstance(batch, list) else rids[0]
        with self._changed:
            requests = self._requests.setdefault(s, _Requests())
            if requests.cancelled:
                raise RequestAborted("the program was cancelled")
            requests.rids.update(rids)
        try:
            yield
        finally:
            with self._changed:
                requests.rids.difference_update(rids)
                self._changed.notify_all()

    def _post(self, route: str, data: dict[str, Any]) -> Any:
        response = http_request(
            self.base_url + route,
            json=data,
            stream=data.get("stream", False),
            api_key=self.api_key,
            verify=self.verify,
        )
        self._assert_success(response)
        return response

    def _assert_success(self, res: Any) -> None:
        try:
            super()._assert_success(res)
        except RuntimeError as error:
            raise RequestError(f"the server refused the request: {error}") from None


def _annotate(data: dict[str, Any], strict: bool) -> None:
    text, params = data.get("text"), data["sampling_params"]
    if isinstance(text, list):
        annotations = [placed_annotation(one, strict=strict) for one in text]
        if any(annotations):
            data["sampling_params"] = [{**params, "custom_params": one} for one in annotations]
    elif text is not None and (annotation := placed_annotation(text, strict=strict)):
        params["custom_params"] = annotation


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent stream; RequestError unless it ends with its mark."""
    for line in response.iter_lines():
        if line == b"data: [DONE]":
            return
        if line.startswith(b"data:"):
            yield json.loads(line.removeprefix(b"data:"))
    raise RequestError("the server closed the stream before its end; its log may say why")


def _check_result(result: dict[str, Any]) -> None:
    if "error" in result:
        raise RequestError(f"the server refused the request: {result['error']}")
    reason = result["meta_info"].get("finish_reason")
    if reason and reason["type"] == "abort":
        raise RequestAborted(f"the request was aborted: {reason.get('message')}")
