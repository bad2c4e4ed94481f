"""A node of the knowledge tree: what is known of it beside its tokens and slots."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from rag_radix.policies.base import Rank, TierName
from rag_radix.sglang_compat import (
    ComponentData,
    ComponentType,
    UnifiedTreeNode,
    time_counter,
)
from rag_radix.statistics import DocumentKey, NodeStatistics

if TYPE_CHECKING:
    from rag_radix.storage.marks import Mark

UNRANKED = Rank(0.0, 0.0)
_TIERS = len(TierName)
# All nodes have the same of both: only SGLang's other kinds of cache use them.
_OTHER_STATE = [ComponentData()] * len(ComponentType)
_NO_NEIGHBOURS: list[Any] = [None] * (2 * len(ComponentType))
# SGLang counts in its class, and whenever a class changes the interpreter forgets where it has
# found the attributes of its instances, 6% of a request. A tree has no nodes but ours.
_ids = itertools.count()


class Occurrence(NamedTuple):
    """A document that ends where its node ends, and begins `tokens` before."""

    document: DocumentKey
    tokens: int


class DocumentNode(UnifiedTreeNode):
    """A run of tokens at its place in the tree: a document, a part of one, or a tail.

    A document occurrence is a chain of nodes, since documents that begin alike share a head
    and chunked prefill inserts piece by piece; only the chain's last node names it.

    Attributes:
        statistics: Use of this node.
        occurrences: Documents that end here; several, the last named kept, when ids differ but
            tokens agree.
        is_tail: No document has ended here or below: a question, an output, an unannotated
            prompt. Once text has become part of a document's path it stays so.
        matched: A later request has used the node or built on it.
        host_copies: Copies to host made of this node's KV since it was inserted.
        host_reclaims: Times its host copy was given up while it was on the device.
        keeps_host_copy: Whether that is never given up, since many prompts begin with it.
        ranks: By `TierName`; a node that was just inserted has none until it is counted.
        offered: By `TierName`, the rank of the tier's live heap entry, if any.
        unmarked_documents: Documents that lie here, in part or whole, and had no node at their
            end when this was noted: those beyond `max_depth`, those within a page, and those of
            which only a part was computed. The last ones noted are kept.
        names_forgotten: Whether more documents end or lie here than are known.
        unmarked_forgotten: Whether those may lie in any part of it.
        on_device: Whether it counts among its parent's `device_children`.
        on_host: Whether it counts as being on host.
        device_children: Children whose KV is on the device.
        mark: What a storage backend has of it, once it is stored.
    """

    # What few nodes have lies in the class until it is set: an instance with more than 30
    # attributes has a dictionary of its own, which is large and slow to make.
    event_hash_value = None
    hit_count = 0
    _tlru_cached_prefix_len = _tlru_history_len = 0
    external_cache_stored = False
    lru_prev = lru_next = _NO_NEIGHBOURS
    rotation_base = None
    load_back_pending_id: int | None = None
    host_reclaims = 0
    unmarked_documents: tuple[DocumentKey, ...] = ()
    names_forgotten = unmarked_forgotten = False
    mark: Mark | None = None

    def __init__(self, tree_components: Any, priority: int = 0) -> None:
        # In place of SGLang's constructor, which takes half of what an insert costs: it makes
        # records and list entries for the state of every kind of cache that there is.
        self.children: dict[Any, DocumentNode] = {}
        self.parent: Any = None
        self.key: Any = None
        self.component_types = tree_components
        self.component_data = list(_OTHER_STATE)
        self.component_data[ComponentType.FULL] = ComponentData()
        self.last_access_time = self.creation_time = time_counter()
        self.hash_value: Any = None
        self.priority = priority
        self.id = next(_ids)
        self.write_through_pending_id: int | None = None

        self.statistics = NodeStatistics()
        self.occurrences: tuple[Occurrence, ...] = ()
        self.is_tail = True
        self.matched = False
        self.host_copies = 0
        self.keeps_host_copy = False
        self.ranks = [UNRANKED] * _TIERS
        self.offered: list[Rank | None] = [None] * _TIERS
        self.on_device = False
        self.on_host = False
        self.device_children = 0
