"""Annotated requests on the real server: what is refused, and where documents end up."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from e2e.cpu_server import Server, running_server
from e2e.exactness import MODEL
from e2e.waiting import until
from transformers import AutoTokenizer

from rag_radix.document import DocumentSpan
from rag_radix.placement import piece_tokenizer

pytestmark = pytest.mark.server

FLAGS = ["--max-total-tokens", "8192", "--context-length", "4096"]

SYSTEM = "Answer from the documents.\n\n"
CAT = "The cat sat on the mat."
DOG = "Dogs bark at night – naïve ones too 🙂."
QUESTION = "\nQuestion: who sat?"
PROMPT = SYSTEM + CAT + DOG + QUESTION
MESSAGES = [
    {"role": "system", "content": "Be brief. " + CAT},
    {"role": "user", "content": DOG + "\n" + QUESTION + "\n" + CAT},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def span(part: str, name: str = "d") -> dict[str, Any]:
    start = PROMPT.index(part)
    return {"id": name, "start": start, "end": start + len(part)}


def rag(*documents: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"rag": {"documents": list(documents), **fields}}


CHARS = rag(span(CAT, "cat"), span(DOG, "dog"), unit="char")


def sampling(custom_params: Any = None, **fields: Any) -> dict[str, Any]:
    return {"max_new_tokens": 4, "temperature": 0, "custom_params": custom_params, **fields}


def refusal(server: Server, path: str, body: dict[str, Any]) -> str:
    """Post what must be refused, and return the message."""
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post(path, body)
    assert error.value.code == 400
    reply = json.loads(error.value.read())
    message: str = reply["error"]["message"] if "error" in reply else reply["message"]
    return message


def stream(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        server.url + path,
        data=json.dumps({**body, "stream": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        lines = [line.decode().removeprefix("data: ").strip() for line in reply]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def pieces_of(tokenizer: Any, text: str, parts: list[str]) -> list[int]:
    found = piece_tokenizer(tokenizer)
    assert found is not None
    spans = [DocumentSpan("d", text.index(p), text.index(p) + len(p)) for p in parts]
    return found.place(text, spans).input_ids


IDS = list(range(10, 50))
ONE = {"id": "d", "start": 2, "end": 9}

NATIVE_MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    (
        "unsorted",
        {"input_ids": IDS, **{"c": rag({**ONE, "start": 9, "end": 12}, ONE)}},
        "[1].start",
    ),
    ("overlapping", {"input_ids": IDS, "c": rag(ONE, {**ONE, "start": 8, "end": 12})}, "[1].start"),
    ("empty", {"input_ids": IDS, "c": rag({**ONE, "end": 2})}, "rag.documents[0].end"),
    ("beyond the ids", {"input_ids": IDS, "c": rag({**ONE, "end": 41})}, "rag.documents[0].end"),
    ("beyond the text", {"text": CAT, "c": rag({**ONE, "end": 24}, unit="char")}, "[0].end"),
    ("boolean", {"input_ids": IDS, "c": rag({**ONE, "start": True})}, "rag.documents[0].start"),
    ("fraction", {"input_ids": IDS, "c": rag({**ONE, "end": 9.0})}, "rag.documents[0].end"),
    ("unknown unit", {"input_ids": IDS, "c": rag(ONE, unit="byte")}, "rag.unit"),
    ("unknown key", {"input_ids": IDS, "c": rag(ONE, documnets=[])}, "rag.documnets"),
    ("no id", {"input_ids": IDS, "c": rag({"start": 2, "end": 9})}, "rag.documents[0].id"),
    ("long id", {"input_ids": IDS, "c": rag({**ONE, "id": "x" * 513})}, "rag.documents[0].id"),
    ("not an object", {"input_ids": IDS, "c": {"rag": [ONE]}}, "rag"),
    ("params not an object", {"input_ids": IDS, "c": ["rag"]}, "custom_params"),
    ("text document", {"text": CAT, "c": rag({"id": "d", "text": CAT})}, "[0].text"),
    ("text and offsets", {"text": CAT, "c": rag({**ONE, "text": CAT})}, "rag.documents[0].start"),
    ("chars of ids", {"input_ids": IDS, "c": rag(ONE, unit="char")}, "rag.unit"),
    ("tokens of text", {"text": CAT, "c": rag(ONE)}, "rag.unit"),
    ("a shorter neighbour", {"text": [PROMPT, CAT], "c": CHARS}, "rag.documents[0].end"),
    ("shorter neighbour ids", {"input_ids": [IDS, IDS[:8]], "c": rag(ONE)}, "[0].end"),
    ("n > 1", {"input_ids": IDS, "c": rag({**ONE, "end": 41}), "n": 2}, "rag.documents[0].end"),
]


@pytest.mark.parametrize("streaming", [False, True], ids=["at once", "streaming"])
@pytest.mark.parametrize(
    ("body", "field"),
    [pytest.param(body, field, id=name) for name, body, field in NATIVE_MISTAKES],
)
def test_generate_refuses_a_mistake_before_it_answers(
    server: Server, body: dict[str, Any], field: str, streaming: bool
) -> None:
    prompt = {k: v for k, v in body.items() if k in ("text", "input_ids")}
    params = sampling(body["c"], n=body.get("n", 1))
    message = refusal(
        server, "/generate", {**prompt, "sampling_params": params, "stream": streaming}
    )
    assert field in message.partition(": ")[0]


@pytest.mark.parametrize("streaming", [False, True], ids=["at once", "streaming"])
def test_a_mistake_in_one_prompt_refuses_the_batch(server: Server, streaming: bool) -> None:
    params = [sampling(), sampling(rag({**ONE, "end": 400}, unit="char"))]
    body = {"text": [CAT, PROMPT], "sampling_params": params, "stream": streaming}
    assert "prompt 1 of the batch" in refusal(server, "/generate", body)


@pytest.mark.parametrize("streaming", [False, True], ids=["at once", "streaming"])
def test_completions_refuse_mistakes(server: Server, streaming: bool) -> None:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "stream": streaming}
    bad = {**body, "custom_params": rag({**ONE, "end": 4000}, unit="char")}
    assert "rag.documents[0].end" in refusal(server, "/v1/completions", bad)
    bad = {**body, "prompt": [PROMPT, CAT], "custom_params": CHARS}
    assert "prompt 1 of the batch" in refusal(server, "/v1/completions", bad)
    bad = {**body, "prompt": IDS, "custom_params": CHARS}
    assert "rag.unit" in refusal(server, "/v1/completions", bad)


@pytest.mark.parametrize("streaming", [False, True], ids=["at once", "streaming"])
def test_chat_completions_refuse_offsets_and_unknown_names(server: Server, streaming: bool) -> None:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 4, "stream": streaming}
    message = refusal(server, "/v1/chat/completions", {**body, "custom_params": rag(ONE)})
    assert message.startswith("rag.documents[0].start: ")
    bad = {**body, "custom_params": rag({"id": "d", "txt": CAT})}
    message = refusal(server, "/v1/chat/completions", bad)
    assert message.startswith("rag.documents[0].txt: ")


@pytest.mark.parametrize("streaming", [False, True], ids=["at once", "streaming"])
def test_strict_chats_are_refused_when_a_document_is_not_there(
    server: Server, streaming: bool
) -> None:
    documents = rag({"id": "a", "text": CAT}, {"id": "b", "text": "no such text"}, strict=True)
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 4, "stream": streaming}
    message = refusal(server, "/v1/chat/completions", {**body, "custom_params": documents})
    assert message.startswith("rag.documents[1].text: ")


def test_other_chats_are_served_unannotated_and_counted(server: Server, tokenizer: Any) -> None:
    before = server.get("/rag/stats")["door"]["unplaced_requests"]
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    plain = server.post("/v1/chat/completions", body)
    documents = rag({"id": "b", "text": "no such text"})
    reply = server.post("/v1/chat/completions", {**body, "custom_params": documents})
    assert reply["choices"][0]["message"] == plain["choices"][0]["message"]
    assert reply["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert server.get("/rag/stats")["door"]["unplaced_requests"] == before + 1


def test_char_spans_of_a_text_are_tokenized_in_pieces(server: Server, tokenizer: Any) -> None:
    expected = pieces_of(tokenizer, PROMPT, [CAT, DOG])
    body = {"text": PROMPT, "sampling_params": sampling(CHARS)}
    reply = server.generate(**body, return_prompt_token_ids=True)
    assert reply["prompt_token_ids"] == expected
    assert reply["meta_info"]["prompt_tokens"] == len(expected)
    final = stream(server, "/generate", body)[-1]
    assert final["meta_info"]["prompt_tokens"] == len(expected)
    assert final["text"] == reply["text"]


def test_batches_are_tokenized_in_pieces_one_by_one(server: Server, tokenizer: Any) -> None:
    expected = [pieces_of(tokenizer, PROMPT, [CAT, DOG]), tokenizer.encode(CAT)]
    replies = server.generate(
        text=[PROMPT, CAT],
        sampling_params=[sampling(CHARS), sampling()],
        return_prompt_token_ids=True,
    )
    assert [reply["prompt_token_ids"] for reply in replies] == expected


def test_parallel_samples_share_the_pieces(server: Server, tokenizer: Any) -> None:
    expected = pieces_of(tokenizer, PROMPT, [CAT, DOG])
    replies = server.generate(text=PROMPT, sampling_params=sampling(CHARS, n=2))
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [len(expected)] * 2


def test_completions_are_tokenized_in_pieces(server: Server, tokenizer: Any) -> None:
    expected = pieces_of(tokenizer, PROMPT, [CAT, DOG])
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "custom_params": CHARS}
    reply = server.post("/v1/completions", body)
    assert reply["usage"]["prompt_tokens"] == len(expected)
    reply = server.post("/v1/completions", {**body, "prompt": [PROMPT, PROMPT], "echo": True})
    assert reply["usage"]["prompt_tokens"] == 2 * len(expected)
    assert all(choice["text"].startswith(PROMPT) for choice in reply["choices"])


def test_token_spans_leave_the_prompt_as_it_is(server: Server) -> None:
    reply = server.generate(
        input_ids=IDS, sampling_params=sampling(rag(ONE)), return_prompt_token_ids=True
    )
    plain = server.generate(input_ids=IDS, sampling_params=sampling())
    assert reply["prompt_token_ids"] == IDS
    assert reply["text"] == plain["text"]


def test_chat_documents_are_cut_out_of_the_templated_prompt(server: Server, tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    expected = pieces_of(tokenizer, rendered, [CAT, DOG])
    body = {
        "model": "m",
        "messages": MESSAGES,
        "max_tokens": 4,
        "return_prompt_token_ids": True,
        "custom_params": rag({"id": "a", "text": f"\n{CAT} "}, {"id": "b", "text": DOG}),
    }
    reply = server.post("/v1/chat/completions", body)
    assert reply["usage"]["prompt_tokens"] == len(expected)
    assert reply["choices"][0]["prompt_token_ids"] == expected


def test_unannotated_requests_are_tokenized_as_ever(server: Server, tokenizer: Any) -> None:
    reply = server.generate(text=PROMPT, sampling_params=sampling(), return_prompt_token_ids=True)
    assert reply["prompt_token_ids"] == tokenizer.encode(PROMPT)
    reply = server.generate(
        text=PROMPT, sampling_params=sampling({"mine": [1]}), return_prompt_token_ids=True
    )
    assert reply["prompt_token_ids"] == tokenizer.encode(PROMPT)


def test_refusals_and_annotated_requests_are_counted(server: Server) -> None:
    before = server.get("/rag/stats")["door"]
    bad = {"input_ids": IDS, "sampling_params": sampling(rag(ONE, unit="byte"))}
    refusal(server, "/generate", bad)
    refusal(server, "/generate", {**bad, "stream": True})
    server.generate(input_ids=IDS, sampling_params=sampling(rag(ONE)))
    server.generate(input_ids=IDS, sampling_params=sampling())
    after = server.get("/rag/stats")["door"]
    assert after["refused_requests"] == before["refused_requests"] + 2
    assert after["annotated_requests"] == before["annotated_requests"] + 1


def test_after_all_refusals_the_server_still_answers(server: Server) -> None:
    assert server.generate(text=CAT, sampling_params=sampling())["text"]
    loads = server.get("/v1/loads?include=core,queues")["loads"]
    assert all(load["num_running_reqs"] == 0 for load in loads)
    assert all(load["num_waiting_reqs"] == 0 for load in loads)


@pytest.mark.slow
def test_without_the_knowledge_tree_nothing_is_read_or_refused(tokenizer: Any) -> None:
    with running_server(MODEL, *FLAGS) as stock:
        reply = stock.generate(
            text=PROMPT, sampling_params=sampling(CHARS), return_prompt_token_ids=True
        )
        assert reply["prompt_token_ids"] == tokenizer.encode(PROMPT)
        assert stock.generate(text=CAT, sampling_params=sampling({"rag": "nonsense"}))["text"]
        with pytest.raises(urllib.error.HTTPError) as error:
            stock.get("/rag/stats")
        assert error.value.code == 404
        assert "Applied 1 hook(s) to sglang.srt.entrypoints" not in stock.log()


@pytest.mark.slow
def test_extra_http_workers_place_documents_too_and_one_of_them_warms(
    tokenizer: Any, tmp_path: Path
) -> None:
    expected = pieces_of(tokenizer, PROMPT, [CAT, DOG])
    order = tmp_path / "warm.json"
    order.write_text(json.dumps({"documents": [{"id": "cat", "text": CAT}]}))
    flags = [*FLAGS, "--radix-cache-backend", "knowledge-tree", "--tokenizer-worker-num", "2"]
    flags += ["--radix-eviction-policy-config", json.dumps({"warm": str(order)})]
    with running_server(MODEL, *flags) as workers:
        until(lambda: workers.get("/rag/warm")["warmed"] == 1)
        (warmed,) = workers.get("/rag/documents")["documents"]
        assert warmed["id"] == "cat"
        for _ in range(6):
            reply = workers.generate(
                text=PROMPT, sampling_params=sampling(CHARS), return_prompt_token_ids=True
            )
            assert reply["prompt_token_ids"] == expected
            bad = {"input_ids": IDS, "sampling_params": sampling(rag(ONE, unit="byte"))}
            assert "rag.unit" in refusal(workers, "/generate", {**bad, "stream": True})
        assert "door" in workers.get("/rag/stats")


@pytest.mark.slow
def test_batch_encoding_named_chat_templates_and_keys_go_through_the_same_door(
    tokenizer: Any,
) -> None:
    expected = [pieces_of(tokenizer, PROMPT, [CAT, DOG]), tokenizer.encode(CAT)]
    flags = [*FLAGS, "--radix-cache-backend", "knowledge-tree", "--enable-tokenizer-batch-encode"]
    chat_template = ["--chat-template", "chatml"]
    with running_server(MODEL, *flags, *chat_template, "--api-key", "secret") as keyed:
        replies = post_with_key(
            keyed,
            "/generate",
            {
                "text": [PROMPT, CAT],
                "sampling_params": [sampling(CHARS), sampling()],
                "return_prompt_token_ids": True,
            },
        )
        assert [one["prompt_token_ids"] for one in replies] == expected
        reply = post_with_key(
            keyed,
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": MESSAGES,
                "max_tokens": 4,
                "return_prompt_token_ids": True,
                "custom_params": rag({"id": "a", "text": CAT}, strict=True),
            },
        )
        ids = reply["choices"][0]["prompt_token_ids"]
        assert pieces_of(tokenizer, tokenizer.decode(ids), [CAT]) == ids
        with pytest.raises(urllib.error.HTTPError) as error:
            keyed.get("/rag/stats")
        assert error.value.code == 401


def post_with_key(server: Server, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        server.url + path,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": "Bearer secret"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)


ENGINE = """
import sys
import sglang
from rag_radix.errors import AnnotationError

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1],
        max_total_tokens=8192,
        context_length=4096,
        radix_cache_backend="knowledge-tree",
    )
    def generate(**document):
        rag = {"documents": [{"id": "d", **document}], "unit": "char"}
        params = {"max_new_tokens": 2, "custom_params": {"rag": rag}}
        return engine.generate(prompt="The cat sat.", sampling_params=params)
    try:
        generate(start=4, end=70)
    except AnnotationError as error:
        assert error.field == "rag.documents[0].end"
    else:
        raise AssertionError("not refused")
    assert generate(start=4, end=7)["text"]
    engine.shutdown()
"""


@pytest.mark.slow
def test_the_engine_raises_what_the_server_answers(tmp_path: Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    done = subprocess.run(
        [sys.executable, program, MODEL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
