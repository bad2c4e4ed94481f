"""Token ids for a trace's prompts, which a trace doesn't hold."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from rag_radix import wire
from rag_radix.document import DocumentSpan
from rag_radix.replay.trace import TraceRequest

# A segment's tokens are numbered on from its own multiple of this.
_SEGMENT_TOKENS = 1 << 24


@dataclass(slots=True)
class ReplayPrompt:
    """One request's tokens, in slots of `granularity` tokens.

    Attributes:
        ids: [slots] the whole slots of prompt and computed output; equal where and only where
            the text is.
        prompt_slots: Whole slots of the prompt.
        matchable_slots: Whole slots that may be matched: the last token is always computed.
        computed_tokens: Tokens whose KV is computed: all but the last output token.
        custom_params: The annotation in slots, as it comes to the scheduler; a document that
            lies within a slot has length 0.
        shared_slots: Whole slots of the prompt that its salt doesn't cover.
    """

    ids: array[int]
    prompt_slots: int
    matchable_slots: int
    computed_tokens: int
    custom_params: dict[str, Any]
    shared_slots: int


class PromptTokens:
    """Gives the requests of a trace token ids that are equal where the texts are.

    Text is what `TraceRequest` says: a document by id and version, template text before and
    between documents by place and length, and a question and output that never come again.
    """

    def __init__(self, granularity: int) -> None:
        self._granularity = granularity
        self._segments: dict[object, int] = {}
        self._requests = 0

    def prompt(self, request: TraceRequest) -> ReplayPrompt:
        grain = self._granularity
        self._requests += 1
        computed = request.prompt_tokens + max(request.output_tokens - 1, 0)
        ids: array[int] = array("q")
        # Texts that end in the slot that the next one begins in.
        within: tuple[object, ...] = ()
        end = 0
        for gap, document in enumerate(request.documents):
            if document.start > end:
                within = self._add(ids, within, (gap, document.start - end), end, document.start)
            within = self._add(
                ids, within, (document.id, document.version), document.start, document.end
            )
            end = document.end
        self._add(ids, within, self._requests, end, computed)
        documents = [
            DocumentSpan(each.id, each.start // grain, each.end // grain, each.version)
            for each in request.documents
        ]
        return ReplayPrompt(
            ids,
            request.prompt_tokens // grain,
            max(request.prompt_tokens - 1, 0) // grain,
            computed,
            {
                wire.KEY: wire.normalised(
                    documents, speculative=False, strict=False, salt_from=_salt_from(request)
                )
            },
            request.shared_tokens // grain,
        )

    def _add(
        self, ids: array[int], within: tuple[object, ...], text: object, start: int, end: int
    ) -> tuple[object, ...]:
        """Append the slots that end within `text`, which takes tokens `start` to `end`.

        A slot is known by its last token, and the one that begins in other texts by these,
        too: as a part of a prompt it is behind the same ones anyway, unless they are so short
        that no slot ends in them.

        Returns the texts that the next slot begins in and that no slot has ended in.
        """
        grain = self._granularity
        first, last = start // grain, end // grain
        if first == last:
            return (*within, text) if end > start and start % grain else (text,)
        base = self._segment(text)
        numbers = np.arange(
            base + (first + 1) * grain - 1 - start, base + last * grain - start, grain
        )
        if within:
            numbers[0] = self._segment((within, int(numbers[0])))
        ids.frombytes(numbers.tobytes())
        return ()

    def _segment(self, text: object) -> int:
        return self._segments.setdefault(text, len(self._segments)) * _SEGMENT_TOKENS


def _salt_from(request: TraceRequest) -> int | None:
    if not request.shared_tokens:
        return None
    return sum(document.end <= request.shared_tokens for document in request.documents)
