"""From character offsets to tokens.

A prompt is cut at its document boundaries and every piece is tokenized on its own, so a
document's tokens never depend on its neighbours. Two things belong to the prompt as a whole and
not to a piece:

- Special tokens that the tokenizer adds (BOS, and for some EOS) come once, around everything.
  They are never part of a document.
- Tokenizers of the SentencePiece family put a space mark before the text they are given. Only the
  first piece keeps it, as in the prompt tokenized whole. Any other piece is tokenized behind a
  sentinel character whose tokens are then cut off; a sentinel that merged with the piece is
  noticed and another one tried.

Offsets count Python characters (Unicode code points), neither bytes nor UTF-16 units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from rag_radix.document import DocumentSpan

_SPACE_MARKS = ("▁", "Ġ")
_SENTINELS = ("\n", ".", "a", "0")
_PROBE = "a"


class PlacedPrompt(NamedTuple):
    """A tokenized prompt and its documents.

    Attributes:
        input_ids: The whole prompt.
        documents: Token spans in `input_ids`; a document without any token is left out.
        left_out: The indices of those.
    """

    input_ids: list[int]
    documents: tuple[DocumentSpan, ...]
    left_out: tuple[int, ...] = ()

    def salt_from(self, given: int | None) -> int | None:
        """So many of the first `given` documents are left; None if there is nothing to share, or
        if nobody knows any longer where that ends."""
        if given is None or (given == 0 and 0 in self.left_out):
            return None
        left = min(given - sum(out < given for out in self.left_out), len(self.documents))
        return None if left == 0 != given else left


@dataclass(frozen=True, slots=True)
class PieceTokenizer:
    """Tokenizes a prompt in pieces; made by `piece_tokenizer`.

    Attributes:
        tokenizer: Anything with the `encode` of a Hugging Face tokenizer.
        prefix_ids: Special tokens that it puts before a text.
        suffix_ids: Special tokens that it puts behind a text.
        marks_space: It puts a space mark before a text.
    """

    tokenizer: Any
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    marks_space: bool

    def place(
        self,
        text: str,
        documents: Sequence[DocumentSpan],
        *,
        add_special_tokens: bool = True,
    ) -> PlacedPrompt:
        """Tokenize `text`, cut at the boundaries of `documents`.

        Args:
            text: The prompt.
            documents: Ascending, disjoint character spans within `text`.
            add_special_tokens: Whether to add the tokenizer's special tokens around the prompt.
        """
        input_ids = list(self.prefix_ids) if add_special_tokens else []
        placed: list[DocumentSpan] = []
        left_out: list[int] = []
        at = 0
        for index, document in enumerate(documents):
            input_ids += self._piece(text[at : document.start], first=at == 0)
            start = len(input_ids)
            input_ids += self._piece(text[document.start : document.end], first=document.start == 0)
            if len(input_ids) > start:
                placed.append(DocumentSpan(document.id, start, len(input_ids), document.version))
            else:
                left_out.append(index)
            at = document.end
        input_ids += self._piece(text[at:], first=at == 0)
        if add_special_tokens:
            input_ids += self.suffix_ids
        return PlacedPrompt(input_ids, tuple(placed), tuple(left_out))

    def _piece(self, text: str, *, first: bool) -> list[int]:
        if not text:
            return []
        if self.marks_space and not first:
            for sentinel in _SENTINELS:
                head = _encode(self.tokenizer, sentinel)
                ids = _encode(self.tokenizer, sentinel + text)
                if ids[: len(head)] == head:
                    return ids[len(head) :]
        return _encode(self.tokenizer, text)


@lru_cache(maxsize=8)
def piece_tokenizer(tokenizer: Any) -> PieceTokenizer | None:
    """Find out what `tokenizer` adds to a text.

    Returns:
        None when it does more than put special tokens around a text; a prompt can't be tokenized
        in pieces then.
    """
    plain = _encode(tokenizer, _PROBE)
    whole = list(tokenizer.encode(_PROBE))
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return PieceTokenizer(
                tokenizer=tokenizer,
                prefix_ids=tuple(whole[:at]),
                suffix_ids=tuple(whole[at + len(plain) :]),
                marks_space=_first_token(tokenizer, plain).startswith(_SPACE_MARKS),
            )
    return None


def locate(texts: Sequence[str], prompt: str) -> list[tuple[int, int]] | int:
    """Find texts in a prompt, one after the other.

    Templates may trim the text of a message, so outer white space doesn't count. Of several
    occurrences the first one counts that lies behind the previous document: taking the earliest
    never hides a later document.

    Returns:
        The character range of every text, or the index of the first text that isn't there.
    """
    ranges: list[tuple[int, int]] = []
    at = 0
    for index, text in enumerate(texts):
        wanted = text.strip()
        start = prompt.find(wanted, at)
        if start < 0:
            return index
        at = start + len(wanted)
        ranges.append((start, at))
    return ranges


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _first_token(tokenizer: Any, ids: list[int]) -> str:
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    if convert is None:
        return ""
    token = convert(ids[:1])[0]
    return token if isinstance(token, str) else ""
