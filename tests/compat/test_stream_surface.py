"""What a stream that goes on relies on of SGLang's server."""

from __future__ import annotations

import inspect
from dataclasses import fields

from sglang.srt.entrypoints.openai.protocol import DetokenizeRequest, DetokenizeResponse
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import GenerateReqInput


def test_a_request_can_ask_for_the_tokens_of_its_prompt() -> None:
    assert "return_prompt_token_ids" in {field.name for field in fields(GenerateReqInput)}


def test_the_text_of_tokens_can_be_asked_for() -> None:
    assert "tokens" in DetokenizeRequest.model_fields
    assert "text" in DetokenizeResponse.model_fields


def test_text_is_held_back_while_its_last_character_is_not_whole() -> None:
    source = inspect.getsource(DetokenizerManager._decode_batch_token_id_output)
    assert 'new_text and not new_text.endswith("\ufffd")' in source
