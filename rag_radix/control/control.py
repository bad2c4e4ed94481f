"""What an operator can do to one tree, and what the tree has to tell for that."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from rag_radix.control.pins import Pin, Pins
from rag_radix.control.retirement import Removed, Retirement, RetirementCounters
from rag_radix.control.selector import Selector
from rag_radix.control.versions import Versions
from rag_radix.sglang_compat import is_answered_with_error, rank_consensus
from rag_radix.statistics import DocumentKey

if TYPE_CHECKING:
    from rag_radix.control.metrics import TreeMetrics
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode


_F = TypeVar("_F", bound=Callable[..., Any])
_same_on_all_ranks: Callable[[_F], _F] = rank_consensus(same_params=True, same_results=True)


class Control:
    """Operators' calls on one tree; every rank executes the same ones in the same order.

    Attributes:
        longest_request_tokens: What one request may need of the device.
        metrics: Series in Prometheus, if this rank has them.
    """

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._retirement = Retirement(tree)
        self._versions = Versions()
        self._pins = Pins(tree)
        self.longest_request_tokens = 0
        self.metrics: TreeMetrics | None = None

    # Calls

    @_same_on_all_ranks
    def invalidate(self, selector: Selector) -> Removed:
        """Retire the documents that `selector` means; see `retirement`."""
        self._versions.forget(selector)
        return self._retirement.retire(selector)

    @_same_on_all_ranks
    def pin(self, pin: Pin) -> int:
        """Keep documents in a tier; see `Pins.pin`."""
        return self._pins.pin(pin)

    @_same_on_all_ranks
    def undo_pin(self, selector: Selector, earlier: Pin | None) -> None:
        """Take a pin back; see `Pins.undo`."""
        self._pins.undo(selector, earlier)

    @_same_on_all_ranks
    def unpin(self, selector: Selector) -> int:
        """Keep them no longer; see `Pins.unpin`."""
        return self._pins.unpin(selector)

    @_same_on_all_ranks
    def expire_pins(self, now_s: float) -> int:
        """Keep no longer what was to be kept until `now_s`, on the callers' clock."""
        return self._pins.expire(now_s)

    # Views

    def reaches(self, node: DocumentNode) -> bool:
        """Whether `node` is in the tree and a prompt could find it."""
        return self._retirement.reaches(node)

    def places(self, selector: Selector) -> Iterator[DocumentNode]:
        """The reachable nodes at which documents may be that `selector` means."""
        return self._retirement.places(selector)

    def is_retired(self, node: DocumentNode) -> bool:
        """Whether nothing finds `node`, and thus nothing below it, any more."""
        return self._retirement.is_retired(node)

    @property
    def hides_some(self) -> bool:
        """Whether there are nodes that nothing finds any more."""
        return self._retirement.hides_some

    def is_pinned(self, document: DocumentKey) -> bool:
        return self._pins.is_pinned(document)

    def pin_of(self, selector: Selector) -> Pin | None:
        """The pin that was given for just this selector."""
        return self._pins.of(selector)

    def pins(self) -> list[dict[str, Any]]:
        """All pins, as plain JSON values."""
        return self._pins.listed()

    @property
    def invalidated(self) -> RetirementCounters:
        """What invalidations have done."""
        return self._retirement.counters

    def pinned(self) -> dict[str, dict[str, int]]:
        """By tier, what pins take of their budget."""
        return self._pins.report()

    def report(self) -> dict[str, Any]:
        return {
            "retired_nodes": self._retirement.retired_nodes(),
            "invalidated": asdict(self._retirement.counters),
            "pins": self._pins.report(),
        }

    # What happens in the tree

    def arrived(self, req: Any) -> None:
        """`req` comes to the waiting queue."""
        for document in self._versioned(req):
            if self._versions.is_newer(document):
                self._retirement.retire(
                    Selector(
                        id=document.id,
                        namespace=document.namespace,
                        newer_version=document.version,
                    )
                )

    def _versioned(self, req: Any) -> list[DocumentKey]:
        """The documents of `req`, where versions retire each other."""
        if not self._tree.settings.retire_older_versions:
            return []
        retrieval = self._tree.speculations.retrieval(req)
        return [retrieval.document_key(i) for i in range(len(retrieval.annotation.documents))]

    def pass_begins(self) -> None:
        """The scheduler looks for what to run next."""
        if self.metrics is not None:
            self.metrics.update()

    def started(self, reqs: Sequence[Any]) -> None:
        """A pass begins in which `reqs` prefill."""
        for req in reqs:
            # It may have waited while a newer version came.
            is_outdated = any(map(self._versions.is_older, self._versioned(req)))
            if is_outdated or is_answered_with_error(req):
                req.skip_radix_cache_insert = True
        self._retirement.started(reqs)

    def named(self, end: DocumentNode, document: DocumentKey) -> None:
        """A request has `document`, which ends at `end`."""
        self._pins.named(end, document)

    def retired(self, tops: Iterable[DocumentNode]) -> None:
        """Nothing finds these nodes and what is below them any more."""
        self._pins.retired(tops)

    def give_up_places(self, node_ids: Container[int]) -> int:
        """Some of these nodes must leave both tiers; see `Pins.give_up_places`."""
        return self._pins.give_up_places(node_ids)

    def lost(self, nodes: Sequence[DocumentNode]) -> None:
        """The KV of `nodes` is wrong."""
        self._retirement.lose(nodes)

    def unlocked(self) -> None:
        """A request has ended, or copies are done."""
        self._retirement.sweep()

    def reset(self) -> None:
        """The tree is empty."""
        self._retirement.reset()
        self._pins.reset()
