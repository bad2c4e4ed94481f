"""What happens to an annotated request before SGLang tokenizes it.

`admit` checks the annotation of every prompt of a request against that prompt, tokenizes prompts
with character offsets in pieces, and leaves the request with token offsets in the normalised form
of `rag_radix.wire`. It comes before SGLang expands batches and `n > 1`, so all of SGLang's ways
through its tokenizer see ordinary `input_ids`. Admitting a request twice changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from rag_radix import wire
from rag_radix.control.selector import parse_object
from rag_radix.errors import AnnotationError, ControlError
from rag_radix.placement import PlacedPrompt, piece_tokenizer


@dataclass(frozen=True, slots=True)
class DoorCounts:
    """What has come through the door of this process.

    Attributes:
        annotated_requests: Requests passed on with at least one document.
        unplaced_requests: Chat requests passed on without their documents, which weren't found.
        refused_requests: Requests answered with an error because of their annotation.
    """

    annotated_requests: int = 0
    unplaced_requests: int = 0
    refused_requests: int = 0


class DoorCounters:
    """Counts from several threads: chat templates are rendered off the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = DoorCounts()

    def add(self, **counts: int) -> None:
        """Add to the counts of the given names."""
        with self._lock:
            old = asdict(self._counts)
            self._counts = replace(self._counts, **{k: old[k] + v for k, v in counts.items()})

    def snapshot(self) -> dict[str, int]:
        """All counts by name."""
        return asdict(self._counts)


counters = DoorCounters()


class Manager(Protocol):
    """What is read from SGLang's `TokenizerManager`."""

    tokenizer: Any
    context_len: int
    max_req_input_len: int | None
    allow_auto_truncate: bool


def admit(request: Any, manager: Manager) -> bool:
    """Check and place the documents of a native request, in place.

    Args:
        request: SGLang's `GenerateReqInput`, not yet normalised; unchanged when an error is raised.
        manager: The `TokenizerManager` that will receive it.

    Returns:
        Whether any prompt carries documents.

    Raises:
        AnnotationError: A prompt's annotation is malformed or doesn't fit the prompt.
    """
    params = request.sampling_params
    shared = not isinstance(params, list)
    per_prompt = [params] if shared else params
    raws = [wire.parse(_custom_params(p)) for p in per_prompt]
    if all(raw is None for raw in raws):
        return False
    for own, raw in zip(per_prompt, raws, strict=True):
        if raw is not None and raw.speculative and own.get("n") not in (None, 1):
            raise AnnotationError(
                "rag.speculative",
                f"can't be combined with n={own['n']}, whose samples get ids that the client "
                "doesn't know and can neither promote nor cancel",
            )
    _check_request(request)
    prompts, single = _prompts(request)
    if shared:
        per_prompt, raws = per_prompt * len(prompts), raws * len(prompts)
    _check_salts(raws, request.cache_salt)
    if len(per_prompt) != len(prompts):
        raise AnnotationError(
            "sampling_params", f"has {len(per_prompt)} entries for {len(prompts)} prompts"
        )

    placed: list[PlacedPrompt | None] = []
    for index, (prompt, raw) in enumerate(zip(prompts, raws, strict=True)):
        name = "the prompt" if single else f"prompt {index} of the batch"
        placed.append(None if raw is None else _place(prompt, raw, name, manager.tokenizer))

    limit = _truncation_limit(manager)
    request.sampling_params = [
        p if raw is None or place is None else with_annotation(p, settled(raw, _clip(place, limit)))
        for p, raw, place in zip(per_prompt, raws, placed, strict=True)
    ]
    if any(
        isinstance(prompt, str) and place is not None and place.documents
        for prompt, place in zip(prompts, placed, strict=True)
    ):
        request.input_ids = [
            place.input_ids if place is not None else _as_stock(prompt, manager.tokenizer)
            for prompt, place in zip(prompts, placed, strict=True)
        ]
        request.text = None
        if single:
            request.input_ids = request.input_ids[0]
    if single:
        request.sampling_params = request.sampling_params[0]
    return any(place is not None and place.documents for place in placed)


def place(body: bytes, manager: Manager) -> dict[str, Any]:
    """The tokens of a text prompt and the annotation that counts in them, as `admit` makes them.

    Args:
        body: JSON of ``text``, ``rag`` and, where the request has one, ``cache_salt``.
        manager: The `TokenizerManager`.

    Raises:
        ControlError: The body is something else.
        AnnotationError: As from `admit`, or none of the documents has a token.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    fields = parse_object(body, ("text", "rag", "cache_salt"))
    text, salt = fields.get("text"), fields.get("cache_salt")
    if not isinstance(text, str) or not isinstance(salt, str | None):
        raise ControlError('"text" must be a string, and "cache_salt" a string or null')
    params = {"custom_params": {wire.KEY: fields.get("rag")}}
    request = GenerateReqInput(text=text, sampling_params=params, cache_salt=salt)
    if not admit(request, manager):
        raise AnnotationError("rag.documents", "must hold a document with at least one token")
    return {
        "input_ids": request.input_ids,
        "rag": request.sampling_params["custom_params"][wire.KEY],
    }


def with_annotation(params: dict[str, Any], rag: dict[str, Any] | None) -> dict[str, Any]:
    """A copy of sampling parameters whose annotation is `rag`, or that has none."""
    custom = {k: v for k, v in params["custom_params"].items() if k != wire.KEY}
    if rag is not None:
        custom[wire.KEY] = rag
    return {**params, "custom_params": custom or None}


def _custom_params(params: object) -> object:
    return params.get("custom_params") if isinstance(params, dict) else None


def _check_request(request: Any) -> None:
    if request.session_params is not None:
        raise AnnotationError(
            "rag", "can't be combined with session_params, whose history precedes the prompt"
        )
    if request.contains_mm_input():
        raise AnnotationError(
            "rag", "can't be combined with images, video or audio, which move the tokens"
        )


def _check_salts(raws: Sequence[wire.RawAnnotation | None], salt: str | list[str] | None) -> None:
    salts = salt if isinstance(salt, list) else [salt] * len(raws)
    for raw, own in zip(raws, salts, strict=False):
        if raw is not None and raw.salt_from is not None and not own:
            raise AnnotationError(
                "rag.salt_from", "needs a cache_salt beside it: without one nothing is private"
            )


def _prompts(request: Any) -> tuple[Sequence[Any], bool]:
    """The prompts of a request, and whether it is a single one rather than a batch."""
    if request.input_ids is not None:
        ids = request.input_ids
        single = not ids or isinstance(ids[0], int)
        return ([ids] if single else ids), single
    if request.text is not None:
        single = isinstance(request.text, str)
        return ([request.text] if single else request.text), single
    raise AnnotationError("rag", "needs a prompt given as text or input_ids")


def _place(
    prompt: str | list[int], raw: wire.RawAnnotation, name: str, tokenizer: Any
) -> PlacedPrompt:
    if raw.texts:
        raise AnnotationError(
            "rag.documents[0].text",
            "only chat completions find documents by text: give start and end",
        )
    if not raw.spans:
        return PlacedPrompt([], ())
    is_text = isinstance(prompt, str)
    if raw.unit == "token" and is_text:
        raise AnnotationError(
            "rag.unit", f"'token' counts input_ids, but {name} is text: use 'char'"
        )
    if raw.unit == "char" and not is_text:
        raise AnnotationError(
            "rag.unit", f"'char' counts the characters of a text, but {name} is input_ids"
        )
    wire.check_within(raw, len(prompt), name)
    if not isinstance(prompt, str):
        return PlacedPrompt(prompt, raw.spans)
    if tokenizer is None:
        raise AnnotationError(
            "rag.unit", "'char' needs a tokenizer, which --skip-tokenizer-init left out"
        )
    pieces = piece_tokenizer(tokenizer)
    if pieces is None:
        raise AnnotationError(
            "rag.unit", "'char' isn't possible with this model's tokenizer: send input_ids"
        )
    return pieces.place(prompt, raw.spans)


def _as_stock(prompt: Any, tokenizer: Any) -> Any:
    """Tokenize an unannotated neighbour in a batch whose other prompts became `input_ids`."""
    return list(tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt


def settled(raw: wire.RawAnnotation, place: PlacedPrompt) -> dict[str, Any]:
    """The annotation that goes to the scheduler, once its documents are placed."""
    return wire.normalised(
        place.documents,
        speculative=raw.speculative,
        strict=raw.strict,
        salt_from=place.salt_from(raw.salt_from),
        counts=raw.counts,
    )


def _truncation_limit(manager: Manager) -> int | None:
    """How many tokens of a prompt SGLang keeps, where it shortens prompts without an error."""
    if not manager.allow_auto_truncate:
        return None
    return min(manager.context_len, manager.max_req_input_len or manager.context_len)


def _clip(place: PlacedPrompt, limit: int | None) -> PlacedPrompt:
    if limit is None:
        return place
    kept = tuple(
        replace(document, end=min(document.end, limit))
        for document in place.documents
        if document.start < limit
    )
    return place._replace(documents=kept)
