"""Pinned documents: they and their whole prefix stay in a tier, within its budget.

A pin is an order by name. It holds the places where the document stands when it is given, and as
far as the budget reaches those where it comes to stand later, after a flush too.

On the device a place is held by a lock on its path, as a running request holds it, so SGLang never
counts on these slots. On host the path is copied ahead, and a host lock on each of its nodes keeps
the copies; its device slots come and go.

What time it is, ranks are told: a pin comes with the moment at which it ends, and ends when a call
says that this moment has come. Both are read from one clock, that of the HTTP process, and every
rank gets the calls in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from rag_radix.control.retirement import subtree
from rag_radix.control.selector import Selector
from rag_radix.errors import ControlError
from rag_radix.statistics import DocumentKey

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode

PinTier = Literal["device", "host"]


MAX_TTL_S = 10 * 365 * 86_400.0


def parse_tier(body: Mapping[str, Any]) -> PinTier:
    """The tier of a call's body.

    Raises:
        ControlError: It is none.
    """
    tier = body.get("tier", "device")
    if tier not in ("device", "host"):
        raise ControlError(f'"tier" must be "device" or "host", not {tier!r:.40}')
    return cast(PinTier, tier)


def parse_ttl(body: Mapping[str, Any]) -> float | None:
    """The time to live of a call's body.

    Raises:
        ControlError: It is none.
    """
    ttl_s = body.get("ttl_s")
    if ttl_s is None:
        return None
    if type(ttl_s) not in (int, float) or not 0 < ttl_s <= MAX_TTL_S:
        raise ControlError(f'"ttl_s" must be a number of seconds above 0, not {ttl_s!r:.40}')
    return float(ttl_s)


@dataclass(frozen=True, slots=True)
class Pin:
    """One order to keep documents.

    Attributes:
        selector: Which; by id.
        tier: Where.
        expires_s: When it ends on the caller's clock; None is never.
    """

    selector: Selector
    tier: PinTier
    expires_s: float | None = None


class PinnedTier:
    """The places that are held in one tier.

    Attributes:
        skipped_places: Times that the budget didn't reach for a place that a pin means.
    """

    def __init__(self, tree: KnowledgeTree, name: PinTier) -> None:
        self._tree = tree
        self._name = name
        # SGLang's locks, by the node where a pinned document ends: of which node, and its receipt.
        self._held: dict[int, list[tuple[int, Any]]] = {}
        # By the same node, what it is held for: it forgets the names of some documents.
        self._held_for: dict[int, set[Selector]] = {}
        self.skipped_places = 0

    @property
    def budget_tokens(self) -> int:
        """How much may be pinned here."""
        settings, allocator = self._tree.settings, self._tree.token_to_kv_pool_allocator
        if self._name == "device":
            # A prompt that finds no room even when nothing else runs would wait for ever.
            spare = int(allocator.size) - self._tree.control.longest_request_tokens
            return max(min(int(settings.pin_device_share * allocator.size), spare), 0)
        controller = self._tree.cache_controller
        if controller is None:
            return 0
        return int(settings.pin_host_share * int(controller.mem_pool_host.logical_size))

    @property
    def tokens(self) -> int:
        """How much is pinned here, prefixes included."""
        return self._tokens(self._held)

    @property
    def places(self) -> int:
        return len(self._held)

    def missing(self, ends: Iterable[DocumentNode]) -> int:
        """By how many tokens the budget falls short for paths that end there as well."""
        together = [*self._held, *(node.id for node in ends)]
        return max(self._tokens(together) - self.budget_tokens, 0)

    def holds(self, end: DocumentNode) -> bool:
        return end.id in self._held

    def hold(self, selector: Selector, *ends: DocumentNode) -> None:
        """Keep the paths down to `ends`, at which documents end that `selector` means."""
        tree, paths = self._tree, []
        for end in ends:
            self._held_for.setdefault(end.id, set()).add(selector)
            if end.id in self._held:
                continue
            if self._name == "device":
                self._held[end.id] = [(end.id, tree.inc_lock_ref(end.id).to_dec_params())]
            else:
                paths.append(tree.tree_core.path_to(end.id))
                self._held[end.id] = [
                    (node.id, tree.inc_host_lock_ref(node.id).to_dec_params()) for node in paths[-1]
                ]
        for path in paths:  # once all of them are kept: a copy takes the slots of what isn't
            tree.swap_out.copy_ahead(path)

    def release(self, node_ids: Sequence[int]) -> None:
        """Keep the paths that end there no longer, where they are kept."""
        for node_id in node_ids:
            self._held_for.pop(node_id, None)
            for locked, receipt in reversed(self._held.pop(node_id, ())):
                if self._name == "device":
                    self._tree.dec_lock_ref(locked, receipt)
                else:
                    self._tree.dec_host_lock_ref(locked, receipt)

    def release_all_but(self, pinned: Collection[Selector]) -> None:
        """Keep no longer what isn't held for one of `pinned`."""
        for held_for in self._held_for.values():
            held_for.intersection_update(pinned)
        self.release([node_id for node_id, held_for in self._held_for.items() if not held_for])

    def give_up(self, node_ids: Container[int]) -> int:
        """Keep no longer what ends at one of these nodes; returns how many places that are."""
        given_up = [node_id for node_id in self._held if node_id in node_ids]
        self.release(given_up)
        return len(given_up)

    def forget(self) -> None:
        """The nodes are gone, and their locks with them."""
        self._held.clear()
        self._held_for.clear()

    def _tokens(self, ends: Iterable[int]) -> int:
        core = self._tree.tree_core
        nodes = {node.id: node for end in ends for node in core.path_to(end)}
        return sum(len(node.key) for node in nodes.values())


class Pins:
    """The pins of one tree."""

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._pins: dict[Selector, Pin] = {}
        self._tiers: dict[PinTier, PinnedTier] = {
            "device": PinnedTier(tree, "device"),
            "host": PinnedTier(tree, "host"),
        }

    def pin(self, pin: Pin) -> int:
        """Keep what `pin` means, in place of an earlier pin of the same documents.

        Returns: The places that are held for it now.

        Raises:
            ControlError: There is no such tier, or its budget doesn't reach; nothing has changed.
        """
        tier = self._tiers[pin.tier]
        if pin.tier == "host" and self._tree.cache_controller is None:
            raise ControlError("there is no host tier: --enable-hierarchical-cache adds one")
        ends = self._ends(pin.selector)
        if missing := tier.missing(ends):
            share = f"pin_{pin.tier}_share={getattr(self._tree.settings, f'pin_{pin.tier}_share')}"
            raise ControlError(
                f"the {pin.tier} tier's budget for pins is {tier.budget_tokens:,} tokens, "
                f"{tier.tokens:,} are pinned, and {pin.selector.description} with its prefixes "
                f"needs {missing:,} more than that leaves: unpin others, or raise {share} in "
                "--radix-eviction-policy-config"
                + (
                    " (of the device tier one request of the greatest length always stays free, so "
                    "where that is most of the tier, lower --context-length)"
                    if pin.tier == "device"
                    else ""
                )
            )
        if not ends:
            return 0
        self._pins[pin.selector] = pin
        tier.hold(pin.selector, *ends)
        self._release_unpinned()
        return len(ends)

    def of(self, selector: Selector) -> Pin | None:
        """The pin that was given for just `selector`."""
        return self._pins.get(selector)

    def undo(self, selector: Selector, earlier: Pin | None) -> None:
        """Take back the pin that was given for `selector`, which another scheduler has refused, and
        put back the `earlier` one, as far as the budget still reaches."""
        if selector not in self._pins:
            return  # it was given up meanwhile, so the earlier one isn't wanted either
        if earlier is None:
            del self._pins[selector]
        else:
            self._pins[selector] = earlier
            for end in self._ends(selector):
                self._hold(earlier, end)
        self._release_unpinned()

    def unpin(self, selector: Selector) -> int:
        """Give up the pins that mean documents of this id, or of this id and version.

        Returns: How many there were.
        """
        given_up = [
            pinned
            for pinned in self._pins
            if pinned.id == selector.id
            and selector.version in (None, pinned.version)
            and selector.namespace in (None, pinned.namespace)
        ]
        self._give_up(given_up)
        return len(given_up)

    def expire(self, now_s: float) -> int:
        """Give up the pins that end by `now_s`; returns how many."""
        expired = [
            selector
            for selector, pin in self._pins.items()
            if pin.expires_s is not None and pin.expires_s <= now_s
        ]
        self._give_up(expired)
        return len(expired)

    def named(self, end: DocumentNode, document: DocumentKey) -> None:
        """`document` stands at `end`, which a request holds."""
        for pin in self._pins.values():
            if pin.selector.matches(document):
                self._hold(pin, end)

    def is_pinned(self, document: DocumentKey) -> bool:
        return any(selector.matches(document) for selector in self._pins)

    def retired(self, tops: Iterable[DocumentNode]) -> None:
        """Nothing finds what is at and below `tops` any more, so it isn't kept."""
        gone = [node.id for top in tops for node in subtree(top)] if self._pins else []
        for tier in self._tiers.values():
            tier.release(gone)

    def give_up_places(self, node_ids: Container[int]) -> int:
        """Keep no longer on host what ends at one of these nodes, whatever pins say; returns how
        many places that are."""
        return self._tiers["host"].give_up(node_ids)

    def reset(self) -> None:
        """All nodes are gone; the pins stay."""
        for tier in self._tiers.values():
            tier.forget()

    def listed(self) -> list[dict[str, Any]]:
        """The pins, as plain JSON values."""
        return [
            {**pin.selector.as_json(), "tier": pin.tier, "expires_s": pin.expires_s}
            for pin in self._pins.values()
        ]

    def report(self) -> dict[str, dict[str, int]]:
        return {
            name: {
                "budget_tokens": tier.budget_tokens,
                "pinned_tokens": tier.tokens,
                "places": tier.places,
                "skipped_places": tier.skipped_places,
            }
            for name, tier in self._tiers.items()
        }

    def _ends(self, selector: Selector) -> list[DocumentNode]:
        return [
            node
            for node in self._tree.control.places(selector)
            if any(selector.matches(occurrence.document) for occurrence in node.occurrences)
        ]

    def _hold(self, pin: Pin, end: DocumentNode) -> None:
        """Keep the path down to `end` for `pin`, if the budget reaches."""
        tier = self._tiers[pin.tier]
        if not tier.holds(end) and tier.missing([end]):
            tier.skipped_places += 1
        else:
            tier.hold(pin.selector, end)

    def _give_up(self, selectors: Sequence[Selector]) -> None:
        for selector in selectors:
            del self._pins[selector]
        self._release_unpinned()

    def _release_unpinned(self) -> None:
        for name, tier in self._tiers.items():
            tier.release_all_but([pin.selector for pin in self._pins.values() if pin.tier == name])
