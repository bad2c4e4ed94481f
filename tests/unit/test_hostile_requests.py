"""Whatever a request holds, the door lets it through or says what is wrong."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hostile import VOCABULARY, dumped, generate_bodies
from sglang.srt.managers.io_struct import GenerateReqInput

from rag_radix import wire
from rag_radix.admission import admit
from rag_radix.errors import AnnotationError, PromptError
from rag_radix.vocabulary import check_token_ids

MANAGER: Any = SimpleNamespace(
    tokenizer=None, context_len=1024, max_req_input_len=1000, allow_auto_truncate=False
)


@pytest.mark.parametrize("seed", range(4))
def test_the_door_lets_a_request_through_or_says_what_is_wrong(seed: int) -> None:
    admitted, messages = 0, []
    for body in generate_bodies(300, seed):
        if dumped(body).count(b"[") > 3_000:  # no JSON parser takes it
            continue
        request = GenerateReqInput(**body)
        try:
            check_token_ids(request.input_ids, VOCABULARY)
            annotated = admit(request, MANAGER)
        except (AnnotationError, PromptError) as error:
            messages.append(str(error))
            continue
        admitted += 1
        params = request.sampling_params
        for each in params if isinstance(params, list) else [params]:
            custom = each.get("custom_params") if isinstance(each, dict) else None
            annotation = wire.spans(custom)
            assert annotation is not None or not annotated
            if annotation is None:
                continue
            spans = annotation.documents
            assert all(a.end <= b.start for a, b in pairwise(spans))
            assert all(0 <= span.start < span.end for span in spans)
            assert annotation.salt_from is None or 0 <= annotation.salt_from <= len(spans)
    assert admitted > 50
    assert len(messages) > 50
    assert max(map(len, messages)) < 1000
