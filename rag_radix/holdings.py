"""What the tree holds, counted as it changes, so that nobody looks through all of it for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rag_radix.policies.base import TierName
from rag_radix.statistics import DocumentKey

if TYPE_CHECKING:
    from rag_radix.node import DocumentNode, Occurrence


class Holdings:
    """Counts of a tree's nodes and documents.

    Attributes:
        tails: Nodes that are questions, outputs and the like.
        most_copies: Copies to host that one node has had at most.
        given_up_copies: Host copies given up while their nodes were on the device.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """All nodes are gone."""
        self.tails = self.most_copies = self.given_up_copies = 0
        self._places: dict[TierName, dict[DocumentKey, int]] = {
            TierName.DEVICE: {},
            TierName.HOST: {},
        }

    def documents(self, tier: TierName) -> int:
        """How many documents have their ends in `tier`."""
        return len(self._places[tier])

    def places(self, tier: TierName) -> dict[DocumentKey, int]:
        """At how many places each of them has."""
        return dict(self._places[tier])

    def moved(self, node: DocumentNode, tier: TierName, is_there: bool) -> None:
        """`node` has come to `tier` or has left it."""
        for document, _ in node.occurrences:
            self._count(tier, document, 1 if is_there else -1)

    def named(self, node: DocumentNode, occurrence: Occurrence, by: int) -> None:
        """A document ends at `node` (1), or that is forgotten (-1)."""
        for tier, is_there in ((TierName.DEVICE, node.on_device), (TierName.HOST, node.on_host)):
            if is_there:
                self._count(tier, occurrence.document, by)

    def _count(self, tier: TierName, document: DocumentKey, by: int) -> None:
        places = self._places[tier]
        number = places.get(document, 0) + by
        if number:
            places[document] = number
        else:
            del places[document]
