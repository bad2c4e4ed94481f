"""SGLang's own request objects before and after the door."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rag_radix import wire
from rag_radix.admission import DoorCounters, admit, place
from rag_radix.document import DocumentSpan
from rag_radix.errors import AnnotationError, ControlError

IDS = list(range(20))
TEXT = "system, document, question"
CHARS = {"rag": {"documents": [{"id": "d", "start": 8, "end": 16}], "unit": "char"}}
TOKENS = {"rag": {"documents": [{"id": "d", "start": 2, "end": 9}], "speculative": True}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture
def manager(tokenizer: Any) -> Any:
    return SimpleNamespace(
        tokenizer=tokenizer, context_len=100, max_req_input_len=99, allow_auto_truncate=False
    )


def placed(params: dict[str, Any]) -> tuple[DocumentSpan, ...]:
    annotation = wire.spans(params["custom_params"])
    assert annotation is not None
    return annotation.documents


def test_an_unannotated_request_is_not_touched(manager: Any) -> None:
    params = {"custom_params": {"mine": 1}}
    request = GenerateReqInput(text=TEXT, sampling_params=params)
    assert not admit(request, manager)
    assert request.sampling_params is params
    assert request.text == TEXT
    assert not admit(GenerateReqInput(text=TEXT), manager)


def test_a_request_that_repeats_a_counted_one_still_says_so(manager: Any) -> None:
    rag = {**TOKENS["rag"], "speculative": False, "counts": False}
    request = GenerateReqInput(
        input_ids=list(range(9)), sampling_params={"custom_params": {"rag": rag}}
    )
    assert admit(request, manager)
    annotation = wire.spans(request.sampling_params["custom_params"])
    assert annotation is not None
    assert not annotation.counts


def test_a_prompt_is_placed_as_its_request_would_be(manager: Any) -> None:
    text, salt = "früher: " + TEXT, "secret"
    rag = {**CHARS["rag"], "salt_from": 1, "counts": False}
    request = GenerateReqInput(
        text=text, sampling_params={"custom_params": {"rag": rag}}, cache_salt=salt
    )
    admit(request, manager)
    answer = place(json.dumps({"text": text, "rag": rag, "cache_salt": salt}).encode(), manager)
    assert answer == {
        "input_ids": request.input_ids,
        "rag": request.sampling_params["custom_params"]["rag"],
    }
    assert (answer["rag"]["documents"][0]["start"], answer["rag"]["salt_from"]) == (9, 1)
    again = GenerateReqInput(
        input_ids=[*answer["input_ids"], 1, 2],
        sampling_params={"custom_params": {"rag": answer["rag"]}},
        cache_salt=salt,
    )
    assert admit(again, manager)
    assert again.sampling_params["custom_params"]["rag"] == answer["rag"]


@pytest.mark.parametrize(
    ("body", "kind", "problem"),
    [
        ("[]", ControlError, "must be a JSON object"),
        ({"text": 1, "rag": CHARS["rag"]}, ControlError, '"text" must be a string'),
        ({"text": TEXT, "rag": CHARS["rag"], "cache_salt": 1}, ControlError, '"cache_salt" a'),
        ({"text": TEXT, "rag": CHARS["rag"], "more": 1}, ControlError, "'more' is unknown"),
        ({"text": TEXT}, AnnotationError, "rag: must be an object, not null"),
        ({"text": TEXT, "rag": {"documents": []}}, AnnotationError, "at least one token"),
        ({"text": "short", "rag": CHARS["rag"]}, AnnotationError, "beyond the 5 chars"),
        ({"text": TEXT, "rag": TOKENS["rag"]}, AnnotationError, "'token' counts input_ids"),
        ({"text": TEXT, "rag": {**CHARS["rag"], "salt_from": 1}}, AnnotationError, "cache_salt"),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(
    manager: Any, body: Any, kind: type[ValueError], problem: str
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    with pytest.raises(kind, match=problem):
        place(content.encode(), manager)


def test_the_clients_own_dictionaries_are_not_changed(manager: Any) -> None:
    custom = {**TOKENS, "mine": 1}
    request = GenerateReqInput(input_ids=IDS, sampling_params={"custom_params": custom})
    assert admit(request, manager)
    assert custom == {**TOKENS, "mine": 1}
    assert request.sampling_params["custom_params"]["mine"] == 1
    assert request.sampling_params["custom_params"]["rag"]["speculative"] is True


def test_admitting_twice_changes_nothing(manager: Any) -> None:
    request = GenerateReqInput(text=TEXT, sampling_params={"custom_params": CHARS})
    assert admit(request, manager)
    params, ids = request.sampling_params, request.input_ids
    assert admit(request, manager)
    assert request.sampling_params == params
    assert request.input_ids == ids
    assert request.text is None


@pytest.mark.parametrize("samples", [1, 3])
def test_shared_parameters_hold_for_every_prompt_and_sample(manager: Any, samples: int) -> None:
    params = {"n": samples, "custom_params": CHARS}
    request = GenerateReqInput(text=[TEXT, "another, longer prompt"], sampling_params=params)
    assert admit(request, manager)
    request.normalize_batch_and_arguments()
    for i in range(2 * samples):
        assert placed(request[i].sampling_params) == (DocumentSpan("d", 8, 16),)
        assert request[i].text is None
    assert len(request[0].input_ids) == len(TEXT)
    assert len(request[1].input_ids) == 22


def test_parallel_samples_of_one_prompt_stay_one_prompt(manager: Any) -> None:
    params = {"n": 2, "custom_params": CHARS}
    request = GenerateReqInput(text=TEXT, sampling_params=params)
    assert admit(request, manager)
    request.normalize_batch_and_arguments()
    assert request.batch_size == 1
    assert request[0].input_ids == request[1].input_ids


def test_a_refused_request_is_unchanged(manager: Any) -> None:
    params = [{"custom_params": CHARS}, {"custom_params": TOKENS}]
    request = GenerateReqInput(text=[TEXT, TEXT], sampling_params=params)
    with pytest.raises(AnnotationError, match="prompt 1 of the batch is text"):
        admit(request, manager)
    assert request.text == [TEXT, TEXT]
    assert request.input_ids is None
    assert request.sampling_params is params


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input_ids": IDS, "session_params": {"id": "s"}}, "rag"),
        ({"input_ids": IDS, "image_data": "image.png"}, "rag"),
        ({"input_embeds": [[0.5]]}, "rag"),
        ({"input_ids": [IDS, IDS], "sampling_params": [{"custom_params": TOKENS}]}, "sampling_p"),
    ],
)
def test_what_moves_or_hides_the_tokens_is_refused(
    manager: Any, fields: dict[str, Any], field: str
) -> None:
    params = {"sampling_params": {"custom_params": TOKENS}, **fields}
    with pytest.raises(AnnotationError) as error:
        admit(GenerateReqInput(**params), manager)
    assert error.value.field.startswith(field)


@pytest.mark.parametrize("params", [[{"n": 1}, {"n": 2}], {"n": 2}])
def test_parallel_samples_are_no_speculations(manager: Any, params: Any) -> None:
    batch = params if isinstance(params, list) else [params]
    own = [{**each, "custom_params": TOKENS} for each in batch]
    request = GenerateReqInput(
        input_ids=[IDS, IDS], sampling_params=own if isinstance(params, list) else own[0]
    )
    with pytest.raises(AnnotationError, match=r"rag\.speculative: .*n=2"):
        admit(request, manager)


def test_char_spans_need_a_tokenizer(manager: Any) -> None:
    manager.tokenizer = None
    request = GenerateReqInput(text=TEXT, sampling_params={"custom_params": CHARS})
    with pytest.raises(AnnotationError, match="--skip-tokenizer-init"):
        admit(request, manager)


def test_documents_end_where_the_server_truncates_the_prompt(manager: Any) -> None:
    manager.allow_auto_truncate = True
    manager.max_req_input_len = 7
    documents = [{"id": "a", "start": 2, "end": 9}, {"id": "b", "start": 9, "end": 12}]
    params = {"custom_params": {"rag": {"documents": documents}}}
    request = GenerateReqInput(input_ids=IDS, sampling_params=params)
    assert admit(request, manager)
    assert placed(request.sampling_params) == (DocumentSpan("a", 2, 7),)


@pytest.mark.parametrize("said", [{"speculative": True}, {"counts": False}])
@pytest.mark.parametrize("prompt", [{"text": TEXT}, {"input_ids": IDS}])
def test_a_request_without_documents_keeps_its_prompt(
    manager: Any, prompt: dict[str, Any], said: dict[str, bool]
) -> None:
    params = {"custom_params": {"rag": {"documents": [], **said}}}
    request = GenerateReqInput(**prompt, sampling_params=params)
    assert not admit(request, manager)
    assert (request.text, request.input_ids) == (prompt.get("text"), prompt.get("input_ids"))
    annotation = wire.spans(request.sampling_params["custom_params"])
    assert annotation is not None
    assert {name: getattr(annotation, name) for name in said} == said


def test_counts_add_up() -> None:
    counters = DoorCounters()
    counters.add(refused_requests=1)
    counters.add(refused_requests=1, annotated_requests=1)
    assert counters.snapshot() == {
        "annotated_requests": 1,
        "unplaced_requests": 0,
        "refused_requests": 2,
    }


@pytest.mark.parametrize(
    ("fields", "salt_from"),
    [
        ({"salt_from": 2}, 1),
        ({"salt_from": 1}, None),  # The public document has no tokens: nothing is shared.
        # It was to begin at a document without tokens: what follows that one is private, too.
        ({"salt_from": 0}, None),
        ({}, None),
    ],
)
def test_a_salt_begins_where_it_was_to_when_a_document_has_no_tokens(
    manager: Any, tokenizer: Any, fields: dict[str, Any], salt_from: int | None
) -> None:
    class Trimming:
        def encode(self, text: str, **options: Any) -> Any:
            return tokenizer.encode(text.strip(), **options)

    manager.tokenizer = Trimming()
    spans = [{"id": "blank", "start": 1, "end": 2}, {"id": "d", "start": 2, "end": 4}]
    rag = {"documents": spans, "unit": "char", **fields}
    params = {"custom_params": {"rag": rag}}
    request = GenerateReqInput(text="a bcd", cache_salt="s", sampling_params=params)
    assert admit(request, manager)
    annotation = wire.spans(request.sampling_params["custom_params"])
    assert annotation is not None
    assert [document.id for document in annotation.documents] == ["d"]
    assert annotation.salt_from == salt_from
