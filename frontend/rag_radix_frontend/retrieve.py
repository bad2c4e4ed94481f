"""`rag_retrieve()`: documents in an SGLang program."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from functools import partial

from sglang.lang.ir import SglExpr

from rag_radix_frontend.errors import ArgumentError, RetrievalError
from rag_radix_frontend.ordering import Arrangement, Documents, Order, check_order
from rag_radix_frontend.pipeline import Pipeline, Speculator
from rag_radix_frontend.retrieved_text import RetrievedText, documents_in
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
        order: Order,
        public: bool,
    ) -> None:
        super().__init__(name)
        self._retriever = retriever
        self._query = query
        self._k = k
        self._render = render
        self._speculative = speculative
        self._order = order
        self._public = public

    def compute(self, executor: RagStreamExecutor) -> str:
        backend = executor.backend
        if not isinstance(self._query, str):
            raise ArgumentError(
                f"the query must be text, not {self._query!r}; text that the model generates is "
                "read from the state, as in s['query']"
            )
        if self._order == "cached_first" and not hasattr(backend, "cached_order"):
            raise ArgumentError(
                "order='cached_first' asks the server what is cached, which "
                f"{type(backend).__name__} can't: use rag_radix_frontend.RagEndpoint, or "
                "order='canonical'"
            )
        if self._public and any(not each.public for each in documents_in(executor.text_)):
            raise ArgumentError(
                f"{self.name!r} is to be public, but documents that aren't precede it: retrieve "
                "what is public first"
            )
        if not getattr(backend, "carries_documents", False):
            warnings.warn(
                f"{type(backend).__name__} doesn't tell the server which documents a prompt "
                "holds; use rag_radix_frontend.RagEndpoint to have their KV cache managed",
                UnannotatedWarning,
                stacklevel=1,
            )
        arrange = Arrangement(self._order, partial(self._cached_order, executor))
        speculator: Speculator | None = getattr(backend, "speculator", None)
        with Pipeline(
            executor,
            self.name,
            self._rendered,
            speculator=speculator if self._speculative else None,
            total=speculator.log if speculator else None,
        ) as pipeline:
            for stage in self._retriever.retrieve(self._query, self._k):
                if stage.final:
                    return pipeline.finish(arrange(stage.documents))
                guessed: Documents = ()
                # Asking the server for an order renders the documents and may fail; what isn't
                # the result fails no program.
                with contextlib.suppress(Exception):
                    guessed = arrange(stage.documents) if pipeline.guesses else ()
                pipeline.guess(guessed)
        raise RetrievalError(f"{type(self._retriever).__name__} ended without a final stage")

    def _rendered(self, documents: Documents) -> RetrievedText:
        return render_documents(documents, self._render, public=self._public)

    def _cached_order(self, executor: RagStreamExecutor, documents: Documents) -> Sequence[int]:
        rendered = [self._rendered((each,)) for each in documents]
        order: Sequence[int] = executor.backend.cached_order(
            executor.text_, rendered, public=self._public
        )
        return order

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
    order: Order = "score",
    public: bool = False,
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

    `order` is that of the documents in the text. `score` is the retriever's. `canonical` is the
    same whenever the documents are the same, so that they are found cached more often;
    `cached_first` asks the server, once for each set of documents, which order it has most of in
    its cache. A model's answer may depend on the order.

    `public` documents, and all of the text before them, are nobody's secret: a `RagEndpoint` with a
    `cache_salt` has them shared with those who have another one, or none. What follows the last
    of them stays private, so they are retrieved before others.

    `template` is a string with `{text}` and perhaps `{id}`, or a function of the document. What
    raises in the retriever or the template is raised where the program next uses its state.

    Raises:
        ArgumentError: k, name, template, order or retriever can't work.
    """
    # A traced program's arguments are placeholders, and what is traced never runs.
    if any(isinstance(given, SglExpr) for given in (retriever, query, k, name, template)):
        return SglRetrieve(
            retriever, query, k, name, lambda document: document.text, speculative, order, public
        )
    if not isinstance(retriever, Retriever):
        raise ArgumentError(f"{retriever!r} is no retriever: it has no retrieve(query, k)")
    if not isinstance(query, str):
        raise ArgumentError(f"the query must be text, not {query!r}")
    if not isinstance(k, int) or k < 1:
        raise ArgumentError(f"k must be a whole number of at least 1, not {k!r}")
    if not name:
        raise ArgumentError("name must not be empty: the documents are read as s[name]")
    check_order(order)
    return SglRetrieve(
        retriever, query, k, name, compile_template(template), speculative, order, public
    )
