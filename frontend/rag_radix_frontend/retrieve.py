"""`rag_retrieve()`: documents in an SGLang program."""

from __future__ import annotations

import warnings

from sglang.lang.ir import SglExpr

from rag_radix_frontend.errors import ArgumentError, RetrievalError
from rag_radix_frontend.pipeline import Pipeline, Speculator
from rag_radix_frontend.retriever import Retriever
from rag_radix_frontend.sglang_lang import ComputedText, RagStreamExecutor
from rag_radix_frontend.template import DEFAULT_TEMPLATE, Render, compile_template, render_documents


class UnannotatedWarning(UserWarning):
    """A program's documents are in its prompts, but the server isn't told where."""


class SglRetrieve(ComputedText):
    """The expression that `rag_retrieve()` returns."""

    def __init__(
        self,
        retriever: Retriever,
        query: str | SglExpr,
        k: int,
        name: str,
        render: Render,
        speculative: bool,
    ) -> None:
        super().__init__(name)
        self._retriever = retriever
        self._query = query
        self._k = k
        self._render = render
        self._speculative = speculative

    def compute(self, executor: RagStreamExecutor) -> str:
        backend = executor.backend
        if not isinstance(self._query, str):
            raise ArgumentError(
                f"the query must be text, not {self._query!r}; text that the model generates is "
                "read from the state, as in s['query']"
            )
        if not getattr(backend, "carries_documents", False):
            warnings.warn(
                f"{type(backend).__name__} doesn't tell the server which documents a prompt "
                "holds; use rag_radix_frontend.RagEndpoint to have their KV cache managed",
                UnannotatedWarning,
                stacklevel=1,
            )
        speculator: Speculator | None = getattr(backend, "speculator", None)
        with Pipeline(
            executor,
            self.name,
            lambda documents: render_documents(documents, self._render),
            speculator=speculator if self._speculative else None,
            total=speculator.log if speculator else None,
        ) as pipeline:
            for stage in self._retriever.retrieve(self._query, self._k):
                if stage.final:
                    return pipeline.finish(stage.documents)
                pipeline.guess(stage.documents)
        raise RetrievalError(f"{type(self._retriever).__name__} ended without a final stage")

    def __repr__(self) -> str:
        return f"Retrieve('{self.name}', {self._query!r}, k={self._k})"


def rag_retrieve(
    retriever: Retriever,
    query: str | SglExpr,
    k: int = 2,
    name: str = "docs",
    template: str | Render = DEFAULT_TEMPLATE,
    *,
    speculative: bool = True,
) -> SglRetrieve:
    """Append the k documents that best fit the query, best first.

        @sgl.function
        def answer(s, question):
            s += sgl.user(rag_retrieve(retriever, question) + question)
            s += sgl.assistant(sgl.gen("answer"))

    Used like `sgl.gen()`: on its own, in a sum, within a role. Retrieval runs on the state's
    thread, after what was appended before it. `s[name]` then is the text that was appended, a
    `RetrievedText` with `ids`, `scores` and `texts`, and `s.get_meta_info(name)` a
    `RetrievalReport`. With a `RagEndpoint`, every later request of the state says where the
    documents are; other backends work without that.

    While the retriever searches, a `RagEndpoint` already has the next `gen` or `select` answered
    for the documents found so far, as long as the server has room. If they are the final ones, it
    is the program's answer, otherwise it is ended. `speculative=False` waits for the search.

    `template` is a string with `{text}` and perhaps `{id}`, or a function of the document. What
    raises in the retriever or the template is raised where the program next uses its state.

    Raises:
        ArgumentError: k, name, template or retriever can't work.
    """
    # A traced program's arguments are placeholders, and what is traced never runs.
    if any(isinstance(given, SglExpr) for given in (retriever, query, k, name, template)):
        return SglRetrieve(retriever, query, k, name, lambda document: document.text, speculative)
    if not isinstance(retriever, Retriever):
        raise ArgumentError(f"{retriever!r} is no retriever: it has no retrieve(query, k)")
    if not isinstance(query, str):
        raise ArgumentError(f"the query must be text, not {query!r}")
    if not isinstance(k, int) or k < 1:
        raise ArgumentError(f"k must be a whole number of at least 1, not {k!r}")
    if not name:
        raise ArgumentError("name must not be empty: the documents are read as s[name]")
    return SglRetrieve(retriever, query, k, name, compile_template(template), speculative)
