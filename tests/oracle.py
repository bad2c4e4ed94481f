"""What the knowledge tree should do with a trace, found by looking at everything every time.

Documents are whole nodes and nothing is ever kept sorted: each victim is found by a scan over
all nodes, each estimate by a sum over all uses. It shares no code with the tree but the trace
and the cost table that both are given. One request is served after the other, token by token
(page size 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from rag_radix.replay.trace import TraceRequest

DEVICE, HOST = "device", "host"
FOREVER = float("inf")
# SGLang computes what is on host rather than load fewer tokens.
LOAD_BACK_THRESHOLD_TOKENS = 10


class Served(NamedTuple):
    """What one request found and did, and what both tiers hold afterwards, in tokens."""

    device_hit: int
    host_hit: int
    swapped_out: int
    on_device: int
    on_host: int


@dataclass(eq=False)
class Topic:
    """The times at which requests were about it."""

    uses: list[int] = field(default_factory=list)

    def decayed(self, now: int, half_life: float, *, but_last: bool = False) -> float:
        uses = self.uses[:-1] if but_last else self.uses
        return float(sum(0.5 ** ((now - use) / half_life) for use in uses))


@dataclass(eq=False)
class History:
    """Uses of a path: to a document, of a prompt's beginning or a tail."""

    kind: str
    topic: Topic = field(default_factory=Topic)
    is_first: bool = False
    uses: int = 0
    group: object = None

    @property
    def share(self) -> float:
        return self.uses / len(self.topic.uses)

    def use(self, now: int) -> None:
        """Alike are: new topics' first documents; otherwise documents used once, or whose
        topic's uses, with a half-life of 3,000, count up to 2.5, up to 5, or more, each
        with a share of these up to 20%, up to 50%, or more."""
        self.uses += 1
        self.group = self.kind
        if self.kind == "document":
            count = self.topic.decayed(now, 3_000)
            level = 0 if self.uses == 1 else 1 + (count > 2.5) + (count > 5)
            self.group = level, (self.share > 0.2) + (self.share > 0.5)
            if self.is_first and len(self.topic.uses) == 1:
                self.group = "new"


@dataclass(eq=False)
class Node:
    """A document, the text between two, a question or an output, at its place."""

    id: int
    text: object
    parent: Node | None
    tokens: int
    tail: bool = False
    on_device: bool = True
    on_host: bool = False
    frequency: int = 0
    document_frequency: int = 0
    costs: list[float] = field(default_factory=list)
    last_use: int = 0
    history: History | None = None
    children: dict[object, Node] = field(default_factory=dict)
    # By tier: the priority, and the time until which it holds.
    priority: dict[str, float] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        return sum(self.costs) / len(self.costs) if self.costs else 0.0

    @property
    def uses(self) -> int:
        return max(self.frequency, self.document_frequency)

    def subtree(self) -> Iterator[Node]:
        yield self
        for child in self.children.values():
            yield from child.subtree()


class OraclePolicy(ABC):
    """Priorities; the lowest goes first."""

    gives_up_duplicates = False
    # Priorities rise with uses of other nodes, which is seen when they are next to leave.
    rises = False
    # Documents whose topics are remembered.
    ghosts = FOREVER

    @abstractmethod
    def priority(self, node: Node, tier: str, oracle: Oracle) -> float: ...

    def holds_until(self, node: Node, oracle: Oracle) -> float:
        return FOREVER

    def foreseen(self, node: Node, tier: str, oracle: Oracle) -> float:
        """What uses that are known to come add while they are."""
        return 0.0

    def seen(self, node: Node, oracle: Oracle) -> None:  # noqa: B027 - most need not know
        """A node is inserted or used."""

    def retrieved(self, oracle: Oracle) -> None:  # noqa: B027
        """A retrieval begins to count."""

    def used(self, history: History, oracle: Oracle) -> None:
        history.use(oracle.now)

    def forgotten(self, history: History) -> None:  # noqa: B027
        """The path is a new one when it comes again; nodes keep what they know."""

    def admits(self, kept: list[Node], displaced: list[Node], oracle: Oracle) -> bool:
        return True


class Oracle:
    """Two tiers of whole nodes.

    Args:
        policy: Which node leaves next.
        device_tokens: What the device holds.
        host_tokens: What the host holds.
        cost: Prefill seconds of (cached, new) tokens.
        max_depth: Documents of a prompt that get nodes; no two prompts go on alike below them.
    """

    def __init__(
        self,
        policy: OraclePolicy,
        device_tokens: int,
        host_tokens: int,
        cost: Callable[[int, int], float],
        max_depth: int | None = None,
    ) -> None:
        self.policy = policy
        self._capacity = {DEVICE: device_tokens, HOST: host_tokens}
        self._cost = cost
        self._max_depth = max_depth
        self.now = 0
        self.clock = {DEVICE: 0.0, HOST: 0.0}
        self._ids = 0
        self._root = Node(0, None, None, 0)
        self._in_use: set[Node] = set()
        self._being_copied: set[Node] = set()
        self._retrieved: dict[object, int] = {}
        self._paths: dict[object, History] = {}
        self._topics: dict[object, Topic] = {}
        self._swapped_out = 0
        self._waiting: list[TraceRequest] = []
        self.expected: dict[History, float] = {}

    def expect(self, waiting: list[TraceRequest]) -> None:
        """These are served next, and each use of a path is one in so many."""
        self._waiting = waiting

    def _foresee(self) -> None:
        self.expected = {}
        for request in self._waiting:
            place: tuple[object, ...] = (None,)
            for text, _ in self._texts(request):
                place = (text, *place)
                if (history := self._paths.get(place)) is not None:
                    known = self.expected.get(history, 0.0)
                    self.expected[history] = known + 1 / len(self._waiting)

    def serve(self, request: TraceRequest) -> Served:
        swapped_out = self._swapped_out
        path = self._match(request)
        on_host = [node for node in path if not node.on_device]
        host_hit = sum(node.tokens for node in on_host)
        if 0 < host_hit < LOAD_BACK_THRESHOLD_TOKENS:
            path, host_hit = path[: -len(on_host)], 0
        device_hit = sum(node.tokens for node in path) - host_hit
        self._in_use = set(path)
        self._make_room(host_hit)
        for node in path:
            node.on_device = True
        self._make_room(request.prompt_tokens - device_hit - host_hit)
        path = self._insert(request, path)
        self._count(request, path, device_hit + host_hit)
        self._in_use = set(path)
        if (output := request.output_tokens - 1) > 0:
            self._make_room(output)
            node = self._new_node(path[-1], "output", output, tail=True)
            node.costs.append(self._cost(request.prompt_tokens, output) / output)
            node.history = History("tail")
            self._use_alone(node.history)
            self._rank(node)
        self._in_use = set()
        return Served(
            device_hit,
            host_hit,
            self._swapped_out - swapped_out,
            self._capacity[DEVICE] - self._free(DEVICE),
            self._capacity[HOST] - self._free(HOST),
        )

    # Prompts

    def _texts(self, request: TraceRequest) -> Iterator[tuple[object, int]]:
        """The texts that a prompt is made of, but the question, and their tokens."""
        end = 0
        for gap, document in enumerate(request.documents[: self._max_depth]):
            if document.start > end:
                yield (request.namespace_at(end), gap, document.start - end), document.start - end
            yield (
                (request.namespace_at(document.start), document.id, document.version),
                document.end - document.start,
            )
            end = document.end

    def _match(self, request: TraceRequest) -> list[Node]:
        path: list[Node] = []
        node = self._root
        for text, _ in self._texts(request):
            if text not in node.children:
                break
            node = node.children[text]
            path.append(node)
        return path

    def _insert(self, request: TraceRequest, path: list[Node]) -> list[Node]:
        path, node, end = [], self._root, 0
        for text, tokens in self._texts(request):
            if text not in node.children:
                self._new_node(node, text, tokens)
            node = node.children[text]
            node.on_device = True
            path.append(node)
            end += tokens
        return [*path, self._new_node(node, self.now, request.prompt_tokens - end, tail=True)]

    def _new_node(self, parent: Node, text: object, tokens: int, *, tail: bool = False) -> Node:
        self._ids += 1
        node = Node(self._ids, text, parent, tokens, tail, last_use=self.now)
        parent.children[text] = node
        self._rank(node)
        return node

    def _count(self, request: TraceRequest, path: list[Node], hit: int) -> None:
        self.now += 1
        self.policy.retrieved(self)
        new_tokens = request.prompt_tokens - hit
        cost_per_token_s = self._cost(hit, new_tokens) / new_tokens
        spans = iter(request.documents[: self._max_depth])
        span = next(spans, None)
        topic = self._topic(request, path)
        above: History | None = None
        end = 0
        for node in path:
            start, end = end, end + node.tokens
            node.frequency += 1
            node.last_use = self.now
            if span is not None and start == span.start:
                document = request.namespace_at(span.start), span.id, span.version
                self._retrieved[document] = self._retrieved.get(document, 0) + 1
                node.document_frequency = self._retrieved[document]
                above = node.history = self._history(self._place(node), topic, above is None)
                self.policy.used(above, self)
                span = next(spans, None)
            elif above is not None and not node.tail:
                node.history = above
            else:
                node.history = node.history or History("tail" if node.tail else "prefix")
                self._use_alone(node.history)
            if end > hit:
                node.costs.append(cost_per_token_s)
            self._rank(node)

    @staticmethod
    def _place(node: Node | None) -> tuple[object, ...]:
        place = []
        while node is not None:
            place.append(node.text)
            node = node.parent
        return tuple(place)

    def _topic(self, request: TraceRequest, path: list[Node]) -> Topic:
        """What the request is about; that is a use of it."""
        documents = [
            (request.namespace_at(each.start), each.id, each.version)
            for each in request.documents[: self._max_depth]
        ]
        ends = accumulate(node.tokens for node in path)
        first = next(
            n for n, end in zip(path, ends, strict=True) if end > request.documents[0].start
        )
        known = [self._topics[each] for each in documents if each in self._topics]
        if self._place(first) in self._paths:
            topic = self._paths[self._place(first)].topic
        else:
            topic = max(known, key=lambda each: each.uses[-1], default=Topic())
        for document in documents:
            self._topics.pop(document, None)
            self._topics[document] = topic
            if len(self._topics) > self.policy.ghosts:
                del self._topics[next(iter(self._topics))]
        topic.uses.append(self.now)
        return topic

    def _history(self, place: object, topic: Topic, is_first: bool) -> History:
        history = self._paths.get(place)
        if history is None or history.topic is not topic:
            if history is not None:
                self.policy.forgotten(history)
            self._paths[place] = history = History("document", topic, is_first)
        return history

    def _use_alone(self, history: History) -> None:
        history.topic.uses.append(self.now)
        self.policy.used(history, self)

    def forget(self, history: History) -> None:
        self.policy.forgotten(history)
        self._paths = {place: each for place, each in self._paths.items() if each is not history}

    # Priorities

    def _rank(self, node: Node) -> None:
        self.policy.seen(node, self)
        self._rank_in(node, DEVICE)
        self._rank_in(node, HOST)
        node.priority["duplicate"] = -node.priority[DEVICE]

    def _rank_in(self, node: Node, tier: str) -> None:
        node.priority[tier] = self.policy.priority(node, tier, self)
        node.until[tier] = self.policy.holds_until(node, self)

    def _order(self, node: Node, tier: str) -> tuple[float, int]:
        if node.until[tier] <= self.now:
            self._rank_in(node, tier)
        return node.priority[tier], node.id

    def _ask(self, node: Node, tier: str) -> tuple[float, int]:
        """Where a node stands now, if it may be next."""
        if self.policy.rises:
            self._rank_in(node, tier)
        return self._order_with_foreseen(node, tier)

    def _order_with_foreseen(self, node: Node, tier: str) -> tuple[float, int]:
        priority, number = self._order(node, tier)
        return priority + self.policy.foreseen(node, tier, self), number

    def _lowest(self, candidates: list[Node], tier: str) -> Node:
        """Asked in the order that was known, until no other can be lower."""
        asked: list[tuple[float, int]] = []
        nodes = {node.id: node for node in candidates}
        for order in sorted(self._order(node, tier) for node in candidates):
            if asked and order > min(asked):
                break
            asked.append(self._ask(nodes[order[1]], tier))
        return nodes[min(asked)[1]]

    def _notice(self, node: Node | None, tier: str) -> None:
        """A node that becomes a leaf, though it isn't the next victim."""
        if node is not None and node in self._leaves(tier):
            self._order(node, tier)

    def _leaves(self, tier: str) -> list[Node]:
        is_leaf = self._is_device_leaf if tier == DEVICE else self._is_host_leaf
        return [node for node in self._nodes() if is_leaf(node)]

    def _is_device_leaf(self, node: Node) -> bool:
        busy = node is self._root or node in self._in_use
        return node.on_device and not busy and not any(c.on_device for c in node.children.values())

    def _is_host_leaf(self, node: Node) -> bool:
        return self._is_host_leaf_without(node, [])

    # Eviction

    def _free(self, tier: str) -> int:
        held = (node.on_device if tier == DEVICE else node.on_host for node in self._nodes())
        tokens = (node.tokens for node in self._nodes())
        return self._capacity[tier] - sum(t for t, on in zip(tokens, held, strict=True) if on)

    def _nodes(self) -> Iterator[Node]:
        return self._root.subtree()

    def _make_room(self, tokens: int) -> None:
        self._foresee()
        while self._free(DEVICE) < tokens:
            victim = self._lowest(self._leaves(DEVICE), DEVICE)
            if victim.on_host or (not victim.tail and self._copy(victim)):
                victim.on_device = False
                self._notice(victim, HOST)
            else:
                self._drop(victim)
            self._notice(victim.parent, DEVICE)
            self.clock[DEVICE] = max(self.clock[DEVICE], victim.priority[DEVICE])
        self._being_copied.clear()

    def _drop(self, node: Node) -> None:
        if node.children:
            self._being_copied.clear()
        assert node.parent is not None
        del node.parent.children[node.text]
        self._notice(node.parent, HOST)

    def _copy(self, node: Node) -> bool:
        missing = node.tokens - self._free(HOST)
        if node.tokens > self._capacity[HOST]:
            return False
        leaves = self._host_victims(missing)
        duplicates = self._duplicates(missing)
        if sum(each.tokens for each in leaves + duplicates) < missing:
            return False
        if not self.policy.admits(list(node.subtree()), leaves, self):
            return False
        for each in duplicates:
            each.on_host = False
            self._rank(each)
        for each in leaves:
            if self._free(HOST) < node.tokens:
                self._order(each, HOST)
                self._drop(each)
                self.clock[HOST] = max(self.clock[HOST], each.priority[HOST])
        node.on_host = True
        self._being_copied.add(node)
        self._swapped_out += node.tokens
        self._rank_in(node, HOST)
        if self.policy.gives_up_duplicates:
            self._rank_in(node, DEVICE)
        return True

    def _host_victims(self, missing: int) -> list[Node]:
        chosen: list[Node] = []
        leaves = self._leaves(HOST)
        bared: dict[tuple[float, int], Node] = {}
        while (leaves or bared) and sum(node.tokens for node in chosen) < missing:
            node = self._lowest(leaves, HOST) if leaves else None
            if node is None or (bared and min(bared) < self._order_with_foreseen(node, HOST)):
                node = bared.pop(min(bared))
            else:
                leaves.remove(node)
            chosen.append(node)
            if (parent := node.parent) and self._is_host_leaf_without(parent, chosen):
                bared[self._ask(parent, HOST)] = parent
        return chosen

    def _is_host_leaf_without(self, node: Node, chosen: list[Node]) -> bool:
        busy = node is self._root or node in self._in_use or node in self._being_copied
        bare = all(child in chosen for child in node.children.values())
        return node.on_host and not node.on_device and not busy and bare

    def _duplicates(self, missing: int) -> list[Node]:
        if not self.policy.gives_up_duplicates:
            return []
        both = [node for node in self._nodes() if node.on_device and node.on_host]
        chosen: list[Node] = []
        for node in sorted(both, key=lambda node: (node.priority["duplicate"], node.id)):
            if sum(each.tokens for each in chosen) < missing:
                chosen.append(node)
        return chosen
