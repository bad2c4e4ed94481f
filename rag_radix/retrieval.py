"""One request's way through the tree: what it asked for, what it found, what is counted."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rag_radix import wire
from rag_radix.document import Annotation, DocumentSpan
from rag_radix.history import PathHistory
from rag_radix.sglang_compat import is_finished_unaborted
from rag_radix.statistics import DocumentKey

_NO_DOCUMENTS = Annotation(documents=())


@dataclass(slots=True)
class Retrieval:
    """A request as the tree sees it; kept on SGLang's request so that a retracted and
    re-run request is not counted again.

    Attributes:
        annotation: Its documents.
        kept_documents: Those of them that get nodes of their own; what follows them counts
            as the question's.
        prompt_tokens: Length of its prompt.
        inserted_end: End of the part of it that the request has put into the tree.
        counted: Whether the request is counted.
        counted_end: End of the part of the prompt whose nodes are counted.
        counted_at: SGLang's logical time of the last count. What is younger was inserted
            again, after a retraction.
        counted_at_s: When the request was first counted, if a trace is recorded: seconds
            since its beginning.
        document_counts: Retrievals, this one included, of its documents counted so far.
        histories: Of the paths to them, when the policy asks for them.
        keys: Of these paths, once they were asked for.
    """

    annotation: Annotation
    kept_documents: tuple[DocumentSpan, ...]
    prompt_tokens: int
    inserted_end: int = 0
    counted: bool = False
    counted_end: int = 0
    counted_at: int = 0
    counted_at_s: float = 0.0
    document_counts: list[int] = field(default_factory=list)
    histories: list[PathHistory] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, req: Any, max_depth: int | None) -> Retrieval:
        """The retrieval of SGLang's request `req`, made on first use; its documents beyond
        the first `max_depth` get no nodes of their own."""
        retrieval: Retrieval | None = getattr(req, "rag_retrieval", None)
        if retrieval is None:
            annotation = wire.spans(req.sampling_params.custom_params) or _NO_DOCUMENTS
            kept = tuple(annotation.documents[:max_depth])
            retrieval = req.rag_retrieval = cls(annotation, kept, len(req.origin_input_ids))
        return retrieval

    def counts_now(self, req: Any) -> bool:
        """Whether the part of the prompt that is in the tree now may be counted.

        A speculation counts when it has become the answer, so a cancelled one never does.
        With `n > 1` SGLang computes the prompt in an extra request of zero tokens: that one
        is the retrieval, the samples that follow repeat it.
        """
        if self.annotation.speculative and not is_finished_unaborted(req):
            return False
        params = req.sampling_params
        return bool(params.n == 1 or params.max_new_tokens == 0)

    def document_key(self, index: int, req: Any) -> DocumentKey:
        span = self.annotation.documents[index]
        return DocumentKey(span.id, span.version, req.extra_key, req.cache_salt)

    def path_keys(self, req: Any) -> list[bytes]:
        """By document that gets a node of its own: identifies the prompt up to its end, in
        its namespace."""
        if self.kept_documents and not self.keys:
            namespace = repr((req.extra_key, req.cache_salt)).encode()
            path = blake2b(digest_size=16, key=blake2b(namespace).digest())
            tokens, start = memoryview(array("q", req.origin_input_ids)), 0
            for span in self.kept_documents:
                path.update(tokens[start : span.end])
                self.keys.append(path.digest())
                start = span.end
        return self.keys
