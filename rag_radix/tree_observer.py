"""What the tree tells whoever keeps track of cached prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_radix.node import DocumentNode


class TreeObserver:
    """Hears of every change that could change how much of a prompt is cached; does nothing."""

    def node_added(self, parent: DocumentNode, child_key: Any) -> None:
        """`parent` has a new child, which prompts that go on with `child_key` reach."""

    def node_changed(self, node: DocumentNode) -> None:
        """`node` has come to the device, has left it, or has left the tree."""

    def node_split(self, upper: DocumentNode, lower: DocumentNode) -> None:
        """`upper` now has the beginning of what was `lower`, whose id stays below."""

    def tree_reset(self) -> None:
        """All nodes are gone."""
