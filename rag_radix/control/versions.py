"""Which version of a document is the newest, where that one retires the others."""

from __future__ import annotations

from collections import OrderedDict

from rag_radix.control.selector import Selector
from rag_radix.statistics import DocumentKey

_CAPACITY = 1 << 16
_VERSIONS_KEPT = 16


class Versions:
    """The versions of documents in the order in which they were first asked for.

    What comes last is the newest, since a version is any text. Documents without a version take no
    part. Bounded: of the documents the one that changed longest ago is forgotten, of a document the
    oldest version, which then counts as new again.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._known: OrderedDict[DocumentKey, list[str]] = OrderedDict()

    def is_newer(self, document: DocumentKey) -> bool:
        """Whether its version is one that wasn't asked for before, while others were."""
        if not document.version:
            return False
        name = document._replace(version="")
        known = self._known.setdefault(name, [])
        if document.version in known:
            return False
        known.append(document.version)
        del known[:-_VERSIONS_KEPT]
        self._known.move_to_end(name)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return len(known) > 1

    def is_older(self, document: DocumentKey) -> bool:
        """Whether a newer version than its own was asked for."""
        known = self._known.get(document._replace(version=""), [])
        return document.version in known and document.version != known[-1]

    def forget(self, selector: Selector) -> None:
        """What an operator has invalidated was never the newest: so a version can be taken back."""
        # By id first: of very many documents all others are passed over quickly.
        named = [each for each in self._known.items() if selector.means(each[0].id)]
        for name, known in named:
            known[:] = [
                version for version in known if not selector.matches(name._replace(version=version))
            ]
            if not known:
                del self._known[name]
