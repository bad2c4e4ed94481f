"""Character offsets become tokens, with real tokenizers of both families."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from rag_radix.document import DocumentSpan
from rag_radix.placement import PieceTokenizer, locate, piece_tokenizer

CORPUS = [
    "The cat sat on the mat. The dog, too, sat on a mat and looked at the cat.",
    "Answer the question from the documents below.\n\nQuestion: who sat on the mat?",
    "Über den Wolken – naïve café résumé 東京 🙂 costs 100.00 or 0.50",
    "def place(text):\n    return text[0:100]\n\n\nprint(place('a' * 10))",
] * 20

SYSTEM = "Answer from the documents.\n\n"
CAT = "The cat sat on the mat."
UMLAUT = "Über den Wolken – café 🙂"
QUESTION = "\nQuestion: who sat?"


def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level_with_bos_and_eos() -> Any:
    fast = byte_level()
    fast.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    backend = fast.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", fast.bos_token_id), ("</s>", fast.eos_token_id)],
    )
    return fast


def sentencepiece_model(folder: Path, model_type: str) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=model_type,
        vocab_size=400 if model_type == "bpe" else 330,
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


class SentencePieceProcessor:
    """SentencePiece's own library behind the two methods that placement uses."""

    def __init__(self, path: Path) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._model.encode(text, add_bos=add_special_tokens)
        return ids

    def decode(self, ids: list[int], **_: Any) -> str:
        text: str = self._model.decode(ids)
        return text

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self._model.id_to_piece(i) for i in ids]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "bpe").mkdir()
    (folder / "unigram").mkdir()
    bpe = sentencepiece_model(folder / "bpe", "bpe")
    return {
        "byte-level": byte_level(),
        "byte-level with BOS and EOS": byte_level_with_bos_and_eos(),
        "sentencepiece bpe": SentencePieceProcessor(bpe),
        "sentencepiece unigram": SentencePieceProcessor(
            sentencepiece_model(folder / "unigram", "unigram")
        ),
        "llama": LlamaTokenizer.from_pretrained(str(folder / "bpe")),
    }


KINDS = [
    "byte-level",
    "byte-level with BOS and EOS",
    "sentencepiece bpe",
    "sentencepiece unigram",
    "llama",
]
MARKING = ["sentencepiece bpe", "sentencepiece unigram", "llama"]


@pytest.fixture(params=KINDS)
def pieces(request: pytest.FixtureRequest, tokenizers: dict[str, Any]) -> PieceTokenizer:
    found = piece_tokenizer(tokenizers[request.param])
    assert found is not None
    return found


def span(text: str, part: str, name: str = "d") -> DocumentSpan:
    start = text.index(part)
    return DocumentSpan(name, start, start + len(part))


def tokens_between(pieces: PieceTokenizer, before: str, document: str, after: str) -> list[int]:
    at = DocumentSpan("d", len(before), len(before) + len(document))
    placed = pieces.place(before + document + after, [at])
    (found,) = placed.documents
    return placed.input_ids[found.start : found.end]


def test_a_prompt_without_documents_is_tokenized_as_ever(pieces: PieceTokenizer) -> None:
    for text in [SYSTEM + CAT + QUESTION, UMLAUT, " leading and trailing "]:
        assert pieces.place(text, []).input_ids == pieces.tokenizer.encode(text)


@pytest.mark.parametrize("document", [CAT, UMLAUT, " a space first", "\n\nlines\n", "...", "a 0"])
def test_a_documents_tokens_do_not_depend_on_its_neighbours(
    pieces: PieceTokenizer, document: str
) -> None:
    alone = tokens_between(pieces, SYSTEM, document, QUESTION)
    for before in ["cat", "The ", "\n", "0", ".", "🙂", "a"]:
        for after in ["", "s", " mat", "\n", "0", "."]:
            assert tokens_between(pieces, before, document, after) == alone


def test_the_pieces_decode_to_the_prompt(pieces: PieceTokenizer) -> None:
    text = SYSTEM + CAT + UMLAUT + QUESTION
    placed = pieces.place(text, [span(text, CAT), span(text, UMLAUT)])
    decoded = pieces.tokenizer.decode(
        placed.input_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert decoded == text


def test_special_tokens_come_once_and_lie_in_no_document(pieces: PieceTokenizer) -> None:
    text = CAT + UMLAUT
    placed = pieces.place(text, [span(text, CAT, "a"), span(text, UMLAUT, "b")])
    special = set(pieces.prefix_ids + pieces.suffix_ids)
    assert sum(i in special for i in placed.input_ids) == len(special)
    first, second = placed.documents
    assert first.start == len(pieces.prefix_ids)
    assert second.end == len(placed.input_ids) - len(pieces.suffix_ids)
    assert first.end == second.start


def test_special_tokens_can_be_left_to_a_template(pieces: PieceTokenizer) -> None:
    text = SYSTEM + CAT
    with_special = pieces.place(text, [span(text, CAT)])
    without = pieces.place(text, [span(text, CAT)], add_special_tokens=False)
    end = len(with_special.input_ids) - len(pieces.suffix_ids)
    assert without.input_ids == with_special.input_ids[len(pieces.prefix_ids) : end]


@pytest.mark.parametrize("kind", MARKING)
def test_only_the_start_of_a_prompt_gets_a_space_mark(
    tokenizers: dict[str, Any], kind: str
) -> None:
    pieces = piece_tokenizer(tokenizers[kind])
    assert pieces is not None
    assert pieces.marks_space
    text = "docu" + "ment"
    placed = pieces.place(text, [span(text, "ment")])
    tokens = pieces.tokenizer.convert_ids_to_tokens(placed.input_ids[len(pieces.prefix_ids) :])
    assert "".join(tokens) == "▁document"


def test_bos_and_eos_are_told_apart(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["byte-level with BOS and EOS"]
    pieces = piece_tokenizer(tokenizer)
    assert pieces is not None
    assert pieces.prefix_ids == (tokenizer.bos_token_id,)
    assert pieces.suffix_ids == (tokenizer.eos_token_id,)


def test_offsets_count_code_points(pieces: PieceTokenizer) -> None:
    text = "🙂🙂 東京 " + CAT
    (document,) = pieces.place(text, [DocumentSpan("d", 6, 6 + len(CAT))]).documents
    assert text[6 : 6 + len(CAT)] == CAT
    placed = pieces.place(text, [DocumentSpan("d", 6, 6 + len(CAT))])
    assert (
        pieces.tokenizer.decode(
            placed.input_ids[document.start : document.end],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        == CAT
    )


def test_a_document_may_be_the_whole_prompt(pieces: PieceTokenizer) -> None:
    placed = pieces.place(CAT, [DocumentSpan("d", 0, len(CAT))])
    assert placed.input_ids == pieces.tokenizer.encode(CAT)
    (document,) = placed.documents
    assert document.end - document.start == len(
        pieces.tokenizer.encode(CAT, add_special_tokens=False)
    )


class Uppercasing:
    """A tokenizer that changes the text when it adds special tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in (text.upper() if add_special_tokens else text)]


def test_a_tokenizer_that_changes_the_text_cannot_work_in_pieces() -> None:
    assert piece_tokenizer(Uppercasing()) is None


def test_texts_are_found_in_order() -> None:
    prompt = "<s>alpha beta</s><u>gamma alpha</u>"
    assert locate(["alpha", "gamma", "alpha"], prompt) == [(3, 8), (20, 25), (26, 31)]


def test_a_text_before_the_previous_document_is_not_found() -> None:
    assert locate(["gamma", "beta"], "alpha beta gamma") == 1


def test_the_first_occurrence_counts_even_in_the_system_prompt() -> None:
    assert locate(["alpha"], "<s>alpha</s><u>alpha</u>") == [(3, 8)]


def test_outer_white_space_is_not_searched_for() -> None:
    assert locate(["  alpha\n", "\tbeta gamma "], "alpha beta gamma") == [(0, 5), (6, 16)]


def test_overlapping_texts_do_not_share_characters() -> None:
    assert locate(["aba", "aba"], "ababa") == 1
    assert locate(["aba", "aba"], "ababaXaba") == [(0, 3), (6, 9)]
