"""The backend of SGLang programs that tells the server about documents and can cancel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang.lang.global_config import global_config
from sglang.lang.interpreter import ProgramState, StreamExecutor
from sglang.lang.ir import SglSamplingParams

from rag_radix_frontend.connections import Connections
from rag_radix_frontend.errors import ArgumentError
from rag_radix_frontend.gate import Gate
from rag_radix_frontend.in_flight import InFlight
from rag_radix_frontend.pipeline import Speculator
from rag_radix_frontend.promotion import Promoter
from rag_radix_frontend.replies import checked
from rag_radix_frontend.retries import DEFAULT_RETRIES, Attempts, Retries
from rag_radix_frontend.retrieval_report import RetrievalReport
from rag_radix_frontend.retrieved_text import PlacedDocument, documents_in
from rag_radix_frontend.run_ahead import Call, Method
from rag_radix_frontend.sending import Sender, annotate
from rag_radix_frontend.sglang_lang import own_params
from rag_radix_frontend.speculation import Speculation
from rag_radix_frontend.wire import placed_annotation

_T = TypeVar("_T")

_LOGPROB_OPTIONS = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)

# The server's limit. A select has a request for each choice.
_PROMOTED_AT_ONCE = 1024

# For what a server answers between two iterations, however long the prompts that these compute.
_TIMEOUT_S = 60.0


class RagEndpoint(RuntimeEndpoint):
    """`sgl.RuntimeEndpoint`, with five differences.

    - Every request whose text holds retrieved documents says where they are, `gen` and
      `select` alike. With `strict`, the server refuses those it can't place.
    - The request after a retrieval may be answered while the retrieval still runs
      (`rag_retrieve`), where the server has rag-radix's routes.
    - `cancel(state)` ends a program's requests.
    - What breaks off is asked again (`Retries`), each time under another id, and the request
      before is aborted; speculations aren't. In the end it raises `ConnectionLost`.
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
        cache_salt: str | None = None,
        retries: Retries = DEFAULT_RETRIES,
        routing_documents: int = 0,
    ) -> None:
        """The first three are `sgl.RuntimeEndpoint`'s.

        Args:
            strict: Have the server refuse requests whose documents it can't place.
            cache_salt: Keeps what is cached of the requests from all who don't have it; what
                precedes documents that are retrieved as public, and these, all share.
            retries: When to ask again.
            routing_documents: By how many of their leading documents requests are told apart for
                SGLang's router (`ROUTING_HEADER`); 0 doesn't tell it.
        """
        if routing_documents < 0:
            raise ArgumentError(f"routing_documents must not be negative: {routing_documents}")
        self._retries = retries
        self._attempted(
            base_url,
            lambda: super(RagEndpoint, self).__init__(
                base_url, api_key, verify, chat_template_name
            ),
        )
        # SGLang's client assumes a route for it that its server doesn't have.
        self.support_concate_and_append = False
        self._strict = strict
        self._cache_salt = cache_salt
        self._connections = self._connect(base_url, api_key, verify)
        self._in_flight = InFlight(self._abort)
        self._sender = Sender(
            base_url,
            self._connections,
            self._in_flight,
            abort=self._abort,
            retries=retries,
            strict=strict,
            cache_salt=cache_salt,
            routing_documents=routing_documents,
        )
        self.speculator = Speculator(
            Gate(self._room), self._in_flight, Promoter(self._promote), self._identity
        )

    def _connect(self, base_url: str, api_key: str | None, verify: str | None) -> Connections:
        """What all requests for answers go over."""
        return Connections(base_url, api_key, verify)

    def cancel(self, state: ProgramState) -> None:
        """End a program: its requests are aborted and it may send no more.

        The program gets `RequestAborted`. Returns when the server has let go of its requests,
        speculations included. Forks are states of their own. A request for several samples
        (`n > 1`) can't be aborted; it ends first.
        """
        self._in_flight.cancel(state.stream_executor)

    def cached_order(
        self, text: str, documents: Sequence[str], *, public: bool = False
    ) -> list[int]:
        """Indices of documents in the order of which the server has most in its cache.

        `text` precedes them in the prompt; `documents` are their texts in it, one right after the
        other, and may be `public`. What isn't cached keeps the order given.

        Raises:
            RequestError: the server has no knowledge tree, or can't tokenize in pieces.
        """
        salt = None if public else self._cache_salt
        asked: dict[str, Any] = {"text": text, "documents": list(documents)}
        if annotation := placed_annotation(text, salted=bool(salt)):
            asked |= annotation
        if salt:
            asked["cache_salt"] = salt
        order: list[int] = self._attempted(
            self.base_url + "/rag/order",
            lambda: self._post("/rag/order", asked, self._retries.silence_s).json()["order"],
        )
        return order

    def retrievals(self) -> RetrievalReport:
        """What all retrievals of programs on this endpoint took, and their speculations."""
        return self.speculator.log.report

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], Any]:
        if (kept := self._kept(s, "generate", sampling_params)) is not None:
            answer: tuple[str, Any] = kept.result()
            return answer
        result = self._generate_http_request(s, self._payload(s, sampling_params))
        if isinstance(result, list):
            return [sample["text"] for sample in result], [r["meta_info"] for r in result]
        return result["text"], result["meta_info"]

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Any]]:
        if sampling_params.n != 1:
            raise ArgumentError(f"a stream has one sample, so n must be 1, not {sampling_params.n}")
        if (kept := self._kept(s, "generate_stream", sampling_params)) is not None:
            yield from kept.events()
            return
        data = {**self._payload(s, sampling_params), "stream": True}
        self._add_images(s, data)
        yield from self._sender.streamed(s, data, counts=_counts(s, data))

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        if (kept := self._kept(s, "select", choices, temperature, choices_method)) is not None:
            return kept.result()
        return super().select(s, choices, temperature, choices_method)

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        self._generate_http_request(s, {"text": s.text_, "sampling_params": {"max_new_tokens": 0}})

    def cache_prefix(self, prefix_str: str) -> None:
        data = {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
        annotate(data, self._strict, False, self._cache_salt)
        self._post("/generate", data)

    def _payload(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> dict[str, Any]:
        # A type's stop strings are added in place, and a guess may be sent again.
        sampling_params = own_params(sampling_params)
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
        return self._sender.whole(s, data, counts=_counts(s, data))

    def _attempted(self, url: str, ask: Callable[[], _T]) -> _T:
        attempts = Attempts(self._retries, url)
        while True:
            try:
                return ask()
            except Exception as error:
                attempts.failed(error)

    def _kept(self, s: StreamExecutor, method: Method, *arguments: Any) -> Speculation | None:
        """The speculation that answers this call of a state, if it has one that does."""
        # The copies that speculations run on have none themselves.
        kept: Speculation | None = getattr(s, "kept", None)
        if kept is None:
            return None
        s.kept = None
        if kept.identity == self._identity(Call(s, method, arguments)) and kept.is_answer():
            return kept
        kept.discard()
        return None

    def _identity(self, call: Call) -> object:
        """All that the answer to a call depends on."""
        if call.method == "select":
            data: dict[str, Any] = {"text": call.state.text_, "sampling_params": {}}
            asked: object = call.arguments
        else:
            data = self._payload(call.state, *call.arguments)
            asked = None
        self._add_images(call.state, data)
        annotate(data, self._strict, False, self._cache_salt)
        return call.method, data, asked

    def _room(self) -> int:
        """How many speculations the server would take now."""
        pool = checked(self._connections.request("/rag/pool", timeout_s=_TIMEOUT_S)).json()
        return max(1, pool["max_prefill_bs"] - pool["waiting"]) if pool["accepts"] else 0

    def _promote(self, rids: list[str]) -> Mapping[str, str]:
        states: dict[str, str] = {}
        for start in range(0, len(rids), _PROMOTED_AT_ONCE):
            some = rids[start : start + _PROMOTED_AT_ONCE]
            reply = self._post("/rag/promote", {"rids": some}, timeout_s=_TIMEOUT_S).json()
            states |= reply["rids"]
        return states

    def _abort(self, rid: str) -> None:
        self._post("/abort_request", {"rid": rid}, timeout_s=_TIMEOUT_S)

    def _post(self, route: str, data: dict[str, Any], timeout_s: float | None = None) -> Any:
        return checked(self._connections.request(route, data, timeout_s=timeout_s))

    # What the base class asks goes through here.
    def _assert_success(self, res: Any) -> None:
        checked(res)


def _counts(s: StreamExecutor, data: Mapping[str, Any]) -> bool:
    """Whether a request of a state is a retrieval of its own.

    The choices of a select repeat that of the request before them, and the first request of a
    fork that of the one which has had the shared text computed.
    """
    text = data.get("text")
    if not isinstance(text, str):
        return False
    # The copies that speculations run on are no forks.
    shared: tuple[PlacedDocument, ...] | None = getattr(s, "shared", None)
    if shared is None:
        return True
    s.shared = None
    return documents_in(text) != shared
