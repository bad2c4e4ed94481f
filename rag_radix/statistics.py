"""What is known about a tree node's use: the input of every replacement policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from rag_radix.history import PathHistory


def namespace_name(extra_key: str | None, cache_salt: str | None) -> str:
    """How a namespace is called where it may be seen, since a salt is a secret; "" is the one
    that everybody shares."""
    if not extra_key and not cache_salt:
        return ""
    return blake2b(repr((extra_key, cache_salt)).encode(), digest_size=8).hexdigest()


class DocumentKey(NamedTuple):
    """Identity of a document inside its namespace (SGLang's `extra_key` and `cache_salt`)."""

    id: str
    version: str = ""
    extra_key: str | None = None
    cache_salt: str | None = None

    @property
    def namespace(self) -> str:
        """Name of its namespace."""
        return namespace_name(self.extra_key, self.cache_salt)

    @property
    def name(self) -> tuple[str, str, str]:
        """Id, version and name of its namespace: what may be written down."""
        return self.id, self.version, self.namespace


@dataclass(slots=True)
class NodeStatistics:
    """Use of one node.

    Attributes:
        frequency: Retrievals that read the node since it was inserted.
        document_frequency: Retrievals, at any place, of the document that the node is part
            of, as of its last use; of the most retrieved one when several share the node, 0
            when it is part of none. The count survives the node.
        cost_per_token_s: Sum over the prefills that computed the node of prefill seconds
            divided by new tokens.
        cost_samples: Number of terms in `cost_per_token_s`.
        last_access: Logical time (retrievals served so far) of the last use.
        inserted_at: Logical time when the node came into the tree.
        tokens: Length of the node.
        has_host_copy: Whether its KV is on host.
        history: Use of the path down to the end of the document, which survives the node;
            that of the node alone where there is no document; None when the policy doesn't
            ask for it.
    """

    frequency: int = 0
    document_frequency: int = 0
    cost_per_token_s: float = 0.0
    cost_samples: int = 0
    last_access: int = 0
    inserted_at: int = 0
    tokens: int = 0
    has_host_copy: bool = False
    history: PathHistory | None = None

    @property
    def mean_cost_per_token_s(self) -> float:
        return self.cost_per_token_s / self.cost_samples if self.cost_samples else 0.0

    @property
    def uses(self) -> int:
        """Retrievals that read the node, or its document at any place, whichever is more."""
        frequency, of_document = self.frequency, self.document_frequency
        return frequency if frequency > of_document else of_document

    def add_cost(self, seconds: float, new_tokens: int) -> None:
        self.cost_per_token_s += seconds / new_tokens
        self.cost_samples += 1

    def copy(self) -> NodeStatistics:
        """Statistics for the other half of a split: both halves were used alike."""
        return replace(self)


class DocumentFrequencies:
    """Retrievals per document since start or the last flush, whether cached or not.

    Bounded: beyond `capacity` documents the least recently retrieved one is forgotten
    (about 250 bytes a document).
    """

    def __init__(self, capacity: int = 1 << 18) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[DocumentKey, int] = OrderedDict()
        self._hits: dict[DocumentKey, tuple[int, int]] = {}
        self._restored: dict[tuple[str, str, str], int] = {}

    def __len__(self) -> int:
        return len(self._counts) + len(self._restored)

    def record(self, document: DocumentKey) -> int:
        """Count one retrieval of `document` and return its count."""
        count = self._counts.pop(document, 0) + 1
        if count == 1 and self._restored:
            count += self._restored.pop(document.name, 0)
        self._counts[document] = count
        if len(self._counts) > self._capacity:
            forgotten, _ = self._counts.popitem(last=False)
            self._hits.pop(forgotten, None)
        return count

    def record_hit(self, document: DocumentKey, *, on_host: bool) -> None:
        """A counted retrieval found all of `document`, at least in part `on_host`."""
        device, host = self._hits.get(document, (0, 0))
        self._hits[document] = (device + (not on_host), host + on_host)

    def hits(self, document: DocumentKey) -> tuple[int, int, int]:
        """Retrievals of `document` that found it on the device, on host, and all of them."""
        return (*self._hits.get(document, (0, 0)), self._counts.get(document, 0))

    def restore(self, counts: dict[tuple[str, str, str], int]) -> None:
        """Go on from `counts` of an earlier server, by id, version and name of the namespace."""
        self._restored = counts

    def counts(self) -> Callable[[], Iterator[tuple[tuple[str, str, str], int]]]:
        """What `restore` takes, in a form that another thread can finish."""
        counts, restored = list(self._counts.items()), list(self._restored.items())
        first = max(len(restored) + len(counts) - self._capacity, 0)

        def collect() -> Iterator[tuple[tuple[str, str, str], int]]:
            yield from restored[first:]
            for key, count in counts:
                yield key.name, count

        return collect

    def clear(self) -> None:
        self._counts.clear()
        self._hits.clear()
        self._restored.clear()
