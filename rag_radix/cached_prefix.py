"""How much of each waiting prompt is cached, found again only where the tree has changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rag_radix.tree_observer import TreeObserver

if TYPE_CHECKING:
    from rag_radix.node import DocumentNode
    from rag_radix.tree_core import KnowledgeTreeCore


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """What of a prompt is cached.

    Attributes:
        key: The prompt, as far as it may be taken from the cache, in SGLang's terms.
        device_tokens: Found on the device.
        host_tokens: Found on host, behind those.
        is_current: Whether that holds for the tree as it is now.
        node_ids: The nodes that this depends on.
        ends_inside: That of them which has other tokens than the prompt from somewhere on.
        continuation: Where the prompt would go on: a node's id and the key of a child that it
            doesn't have.
    """

    key: Any
    device_tokens: int = 0
    host_tokens: int = 0
    is_current: bool = False
    node_ids: list[int] = field(default_factory=list)
    ends_inside: int | None = None
    continuation: tuple[int, Any] | None = None

    @property
    def tokens(self) -> int:
        return self.device_tokens + self.host_tokens


class PrefixTracker(TreeObserver):
    """Knows which prompts a change of the tree concerns.

    SGLang's own match cuts nodes and makes them the last used; this one only looks.

    Attributes:
        walks: Times that a prompt was looked up in the tree.
    """

    def __init__(self, core: KnowledgeTreeCore) -> None:
        self.walks = 0
        self._core = core
        self._through: dict[int, set[CachedPrefix]] = {}
        self._waiting_for: dict[tuple[int, Any], set[CachedPrefix]] = {}

    def refresh(self, prefix: CachedPrefix) -> None:
        """Look it up unless it is current."""
        if not prefix.is_current:
            self._walk(prefix)
            prefix.is_current = True
            self.walks += 1
            for node_id in prefix.node_ids:
                self._through.setdefault(node_id, set()).add(prefix)
            if prefix.continuation is not None:
                self._waiting_for.setdefault(prefix.continuation, set()).add(prefix)

    def forget(self, prefix: CachedPrefix) -> None:
        """It is of no more interest, or must be looked up again."""
        prefix.is_current = False
        for node_id in prefix.node_ids:
            _discard(self._through, node_id, prefix)
        prefix.node_ids.clear()
        if prefix.continuation is not None:
            _discard(self._waiting_for, prefix.continuation, prefix)
            prefix.continuation = None

    def _walk(self, prefix: CachedPrefix) -> None:
        core, key = self._core, prefix.key
        page_size, length = core.page_size, len(key)
        node: DocumentNode = core.root_node
        position = device_tokens = 0
        prefix.ends_inside = None
        while position < length:
            run = core.run_at(key, position)
            child_key = run.child_key_at(position, page_size)
            child = node.children.get(child_key)
            if child is None:
                prefix.continuation = (node.id, child_key)
                break
            prefix.node_ids.append(child.id)
            if child.evicted and not child.backuped:
                break
            matched = child.key.match_at(run, position, page_size=page_size)
            position += matched
            if not child.evicted:
                device_tokens = position
            if matched < len(child.key):
                prefix.ends_inside = child.id
                break
            node = child
        prefix.device_tokens, prefix.host_tokens = device_tokens, position - device_tokens

    # The tree

    def node_added(self, parent: DocumentNode, child_key: Any) -> None:
        for prefix in tuple(self._waiting_for.get((parent.id, child_key), ())):
            self.forget(prefix)

    def node_changed(self, node: DocumentNode) -> None:
        for prefix in tuple(self._through.get(node.id, ())):
            self.forget(prefix)

    def node_split(self, upper: DocumentNode, lower: DocumentNode) -> None:
        for prefix in tuple(self._through.get(lower.id, ())):
            if prefix.ends_inside == lower.id:
                self.forget(prefix)
            else:
                prefix.node_ids.append(upper.id)
                self._through.setdefault(upper.id, set()).add(prefix)

    def tree_reset(self) -> None:
        for index in (self._through, self._waiting_for):
            for prefix in {each for prefixes in index.values() for each in prefixes}:
                self.forget(prefix)


def _discard(index: dict[Any, set[CachedPrefix]], key: Any, prefix: CachedPrefix) -> None:
    prefixes = index[key]
    prefixes.discard(prefix)
    if not prefixes:
        del index[key]
