"""The SGLang program of the demo, and what is measured when it runs."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import sglang as sgl
from demo_report import Answer, Retrieved
from rag_radix_frontend import FaissRetriever, RagEndpoint, rag_retrieve

DOCUMENTS = 2
ANSWER_TOKENS = 64
INSTRUCTION = "You answer questions about Python. Use the documents. Answer in one short sentence."

# SGLang prints a failed program's traceback as a warning; the failure itself is raised by ask().
warnings.filterwarnings("ignore", message="Error in stream_executor")


@sgl.function  # type: ignore[untyped-decorator, unused-ignore]
def answer_from_documents(s: Any, retriever: FaissRetriever, question: str) -> None:
    s += sgl.system(INSTRUCTION)
    s += sgl.user(
        rag_retrieve(retriever, question, k=DOCUMENTS)
        + f"Question: {question}\nAnswer in one short sentence."
    )
    # A small model that has answered goes on in a new paragraph.
    s += sgl.assistant(
        sgl.gen("answer", max_tokens=ANSWER_TOKENS, temperature=0, stop=["\n\n", "<|im_end|>"])
    )


class Assistant:
    """Asks the server at `url`, with documents from the index in `index`."""

    def __init__(self, url: str, retriever: FaissRetriever) -> None:
        self._retriever = retriever
        self._endpoint = RagEndpoint(url, chat_template_name="chatml")

    def ask(self, question: str) -> Answer:
        """Run the program once, streaming, and say what it took.

        Time to first token counts from the end of the retrieval. Raises what the program raises.
        """
        state = answer_from_documents.run(
            retriever=self._retriever, question=question, backend=self._endpoint, stream=True
        )
        found = state["docs"]
        started_s = time.monotonic()
        ttft_s = 0.0
        for piece in state.text_iter("answer"):
            if piece and not ttft_s:
                ttft_s = time.monotonic() - started_s
        if error := state.error():
            raise error
        meta = state.get_meta_info("answer")
        cached = meta.get("cached_tokens_details") or {"device": 0, "host": 0}
        return Answer(
            question=question,
            documents=tuple(
                Retrieved(id, score) for id, score in zip(found.ids, found.scores, strict=True)
            ),
            text=state["answer"].strip(),
            finished=meta["finish_reason"]["type"] == "stop",
            ttft_s=ttft_s,
            device_tokens=cached["device"],
            host_tokens=cached["host"],
            prompt_tokens=meta["prompt_tokens"],
        )


def open_index(directory: Path) -> FaissRetriever:
    """The retriever of an index, its encoder loaded."""
    retriever = FaissRetriever.open(directory)
    retriever.warm_up()
    return retriever
