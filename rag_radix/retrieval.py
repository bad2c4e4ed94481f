"""One request's way through the tree: what it asked for, what it found, what is counted."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from rag_radix import wire
from rag_radix.document import Annotation, DocumentSpan
from rag_radix.history import PathHistory, Topic
from rag_radix.statistics import DocumentKey


class Hits(NamedTuple):
    """Tokens of a prompt that didn't need to be computed: found on the device, on host, and
    in all, a storage backend included."""

    device: int = 0
    host: int = 0
    total: int = 0

    @property
    def storage(self) -> int:
        return self.total - self.device - self.host


_NO_DOCUMENTS = Annotation(documents=())
_NO_HITS = Hits()


@dataclass(slots=True)
class Retrieval:
    """A request as the tree sees it; kept on SGLang's request so that a retracted and
    re-run request is not counted again.

    Attributes:
        annotation: Its documents.
        kept_documents: Those of them that get nodes of their own; what follows them counts
            as the question's.
        prompt_tokens: Length of its prompt.
        extra_key: SGLang's namespace.
        cache_salt: Likewise, a secret.
        shared_tokens: How much of its prompt the salt doesn't cover.
        speculative: Whether it is a guess; a promotion ends that.
        hits: What its first prefill found.
        inserted_end: End of the part of it that the request has put into the tree.
        counted: Whether the request is counted.
        counted_end: End of the part of the prompt whose nodes are counted.
        counted_at: SGLang's logical time of the last count. What is younger was inserted
            again, after a retraction.
        counted_at_s: When the request was first counted, if a trace is recorded: seconds
            since its beginning.
        document_counts: Retrievals, this one included, of its documents counted so far.
        topic: What it is about, when the policy asks for histories.
        histories: Of the paths to its documents, likewise.
        keys: Of these paths, once they were asked for.
    """

    annotation: Annotation
    kept_documents: tuple[DocumentSpan, ...]
    prompt_tokens: int
    extra_key: str | None = None
    cache_salt: str | None = None
    shared_tokens: int = 0
    speculative: bool = False
    hits: Hits = _NO_HITS
    inserted_end: int = 0
    counted: bool = False
    counted_end: int = 0
    counted_at: int = 0
    counted_at_s: float = 0.0
    document_counts: list[int] = field(default_factory=list)
    topic: Topic | None = None
    histories: list[PathHistory] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    _bounds: list[tuple[int, int]] = field(default_factory=list)
    _cuts: list[int] = field(default_factory=list)
    _document_keys: list[DocumentKey] = field(default_factory=list)

    @classmethod
    def of(cls, req: Any, max_depth: int | None) -> Retrieval:
        """The retrieval of SGLang's request `req`, made on first use; its documents beyond
        the first `max_depth` get no nodes of their own."""
        retrieval: Retrieval | None = getattr(req, "rag_retrieval", None)
        if retrieval is None:
            annotation = wire.spans(req.sampling_params.custom_params) or _NO_DOCUMENTS
            kept = tuple(annotation.documents[:max_depth])
            retrieval = req.rag_retrieval = cls(
                annotation,
                kept,
                len(req.origin_input_ids),
                req.extra_key,
                req.cache_salt,
                annotation.shared_tokens if req.cache_salt else 0,
                annotation.speculative,
            )
        return retrieval

    def counts_now(self, req: Any) -> bool:
        """Whether the part of the prompt that is in the tree now may be counted.

        A speculation counts once it is promoted, so a wrong guess never does. With `n > 1`
        SGLang computes the prompt in an extra request of zero tokens: that one is the
        retrieval, the samples that follow repeat it. What goes on with an answer that broke off
        repeats its retrieval, too, and says so.
        """
        params = req.sampling_params
        is_first = bool(params.n == 1 or params.max_new_tokens == 0)
        return is_first and self.annotation.counts and not self.speculative

    def note_hits(self, req: Any) -> None:
        device, host = req.cached_tokens_device, req.cached_tokens_host
        self.hits = Hits(device, host, device + host + req.cached_tokens_storage)

    def bounds(self, page_size: int) -> list[tuple[int, int]]:
        """By document: where it begins and ends, rounded down to pages of `page_size`, which
        doesn't change."""
        if not self._bounds:
            self._bounds += [
                (span.start // page_size * page_size, span.end // page_size * page_size)
                for span in self.annotation.documents
            ]
        return self._bounds

    def cuts(self, page_size: int) -> list[int]:
        """Where the prompt is cut into nodes: at its documents' boundaries, where its salt begins
        to cover it, and at its end, likewise."""
        if not self._cuts:
            kept = self.bounds(page_size)[: len(self.kept_documents)]
            end = self.prompt_tokens // page_size * page_size
            shared_end = self.shared_tokens // page_size * page_size
            self._cuts += sorted({shared_end, end, *(cut for bounds in kept for cut in bounds)})
        return self._cuts

    def document_key(self, index: int) -> DocumentKey:
        if not self._document_keys:
            self._document_keys += [
                DocumentKey(span.id, span.version, self.extra_key, self._salt_of(span))
                for span in self.annotation.documents
            ]
        return self._document_keys[index]

    def path_keys(self, req: Any, public_tokens: int) -> list[bytes]:
        """By document that gets a node of its own: identifies the prompt up to its end, in the
        namespace of its place in the tree, which is without a salt up to `public_tokens`."""
        if self.kept_documents and not self.keys:
            # Processors compute this one faster than the others.
            salt = self.cache_salt if public_tokens == 0 else None
            path = sha256(self._namespace(salt))
            tokens, start = memoryview(array("q", req.origin_input_ids)), 0
            for span in self.kept_documents:
                if salt != self.cache_salt and span.start >= public_tokens:
                    salt = self.cache_salt
                    path.update(self._namespace(salt))
                path.update(tokens[start : span.end])
                self.keys.append(path.digest()[:16])
                start = span.end
        return self.keys

    def _salt_of(self, span: DocumentSpan) -> str | None:
        return self.cache_salt if span.start >= self.shared_tokens else None

    def _namespace(self, salt: str | None) -> bytes:
        return sha256(repr((self.extra_key, salt)).encode()).digest()
