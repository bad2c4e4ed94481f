"""Any order of a scheduler's steps over requests in flight keeps the tree right.

The machine plays the scheduler with the real tree, pools and host tier, and keeps a model of
its own: which document occurrences the tree may name, how often each document was retrieved,
and, while nothing has left the tree, how often each node was read.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import orjson
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tree_harness import Harness, harness

from rag_radix import swap_out as swap_out_module
from rag_radix.policies import POLICIES
from rag_radix.sglang_compat import ComponentType
from rag_radix.statistics import DocumentKey

DEVICE_TOKENS = 240
IN_FLIGHT = 4
FULL = ComponentType.FULL

SYSTEMS: list[list[int]] = [[], list(range(100, 107)), list(range(100, 120))]
_HEADING = list(range(1_000, 1_010))
# "a" and "b" begin alike, "d" is shorter than a page, "e" begins with all of "c".
DOCUMENTS: dict[str, list[int]] = {
    "a": [*_HEADING, *range(2_000, 2_024)],
    "b": [*_HEADING, *range(3_000, 3_013)],
    "c": list(range(4_000, 4_032)),
    "d": list(range(5_000, 5_005)),
    "e": list(range(4_000, 4_045)),
    "f": list(range(6_000, 6_060)),
    "g": list(range(7_000, 7_017)),
}


class Place(NamedTuple):
    """A path in the tree: its tokens, and which of them a salt covers."""

    extra_key: str | None
    salt: str | None
    shared_tokens: int
    tokens: tuple[int, ...]


@dataclass(eq=False)
class Flight:
    """A request in flight, and what the model knows of it."""

    req: Any
    prompt: list[int]
    spans: list[tuple[str, int, int]]
    extra_key: str | None
    salt: str | None
    shared_tokens: int  # which the salt doesn't cover
    shared_end: int  # the same in whole pages
    counts: bool
    guess: bool
    phase: str = "waiting"  # or pinned, running, computed
    pins: list[Any] = field(default_factory=list)
    published: int = 0
    was_published: int = 0  # before it was retracted
    inserted: int = 0
    counted_documents: int = 0
    is_counted: bool = False
    tokens_since_prefill: int = 0

    def place(self, end: int) -> Place:
        """Where the first `end` tokens of the prompt are in the tree."""
        shared = self.salt is None or end <= self.shared_end
        return Place(
            self.extra_key,
            None if shared else self.salt,
            0 if shared else self.shared_end,
            tuple(self.prompt[:end]),
        )

    def salt_of(self, span: tuple[str, int, int]) -> str | None:
        return self.salt if span[1] >= self.shared_tokens else None

    def named_path(self, span: tuple[str, int, int]) -> Place:
        """What the path to a document is known by."""
        salt, changes_at = self.salt_of(span), 0
        if salt is not None and self.shared_tokens:
            ends = [end for _, start, end in self.spans if start < self.shared_tokens]
            changes_at = 1 + (ends[-1] if ends else 0)
        return Place(self.extra_key, salt, changes_at, tuple(self.prompt[: span[2]]))


def in_phase(*phases: str) -> Any:
    """Only while there is a request in one of `phases`."""
    return precondition(lambda self: any(flight.phase in phases for flight in self.flights))


class TreeMachine(RuleBasedStateMachine):
    h: Harness
    steps: ClassVar[int] = 0  # of all runs, with the making of each one's tree

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.flights: list[Flight] = []
        self.ended: list[list[int]] = []
        self.answered: list[Flight] = []
        self.requests = 0
        self.retrievals: Counter[DocumentKey] = Counter()
        self.named_paths: set[Place] = set()
        self.occurrences: dict[Place, set[tuple[str, int]]] = {}
        self.read: list[tuple[int, Flight]] = []
        self.clocks = [0.0, 0.0]
        self.removed = False
        self.evicted_before = 0

    @initialize(
        page_size=st.sampled_from([1, 16]),
        policy=st.sampled_from(sorted(POLICIES)),
        swap_out=st.sampled_from(["on_evict", "hot", "eager"]),
        max_depth=st.sampled_from([None, None, 1, 2]),
        hold_copies=st.booleans(),
        # Nothing leaves the tree when the device tier is large.
        device_tokens=st.sampled_from([DEVICE_TOKENS, DEVICE_TOKENS, 16 * DEVICE_TOKENS]),
        host_tokens=st.sampled_from([0, 48, 160, 640]),
        looks_at_queue=st.booleans(),
        ghosts=st.sampled_from([None, None, 3, 8]),
    )
    def build(
        self,
        page_size: int,
        policy: str,
        swap_out: str,
        max_depth: int | None,
        hold_copies: bool,
        device_tokens: int,
        host_tokens: int,
        looks_at_queue: bool,
        ghosts: int | None,
    ) -> None:
        self.page_size = page_size
        self.max_depth = max_depth
        self.ghosts = ghosts
        # So few uses as a run has of a node.
        self.stack.enter_context(patch.object(swap_out_module, "_HOT_USES", 2))
        self.h = self.stack.enter_context(
            harness(
                device_tokens=device_tokens,
                host_tokens=host_tokens,
                page_size=page_size,
                policy=policy,
                policy_config={"swap_out": swap_out, "max_depth": max_depth},
            )
        )
        if host_tokens and hold_copies:
            self.h.hold_copies()
        if looks_at_queue:
            self.h.tree.waiting = self._queue
        if ghosts is not None:
            self.h.tree.histories._capacity = ghosts

    def _queue(self) -> list[Any]:
        return [flight.req for flight in self.flights if flight.phase == "waiting"]

    def teardown(self) -> None:
        try:
            if hasattr(self, "h"):
                while self.flights:
                    self._end(self.flights[0], aborted=True)
                self._finish_copies()
                self.check_idle()
                self.check_tree()
        finally:
            self.stack.close()

    # Steps

    @precondition(lambda self: len(self.flights) < IN_FLIGHT)
    @rule(
        system=st.sampled_from(SYSTEMS),
        names=st.lists(st.sampled_from(sorted(DOCUMENTS)), max_size=3),
        question=st.integers(0, 2),
        question_tokens=st.integers(1, 20),
        history=st.none() | st.integers(0, 7),
        annotated=st.sampled_from([True, True, False]),
        extra_key=st.sampled_from([None, None, None, "key"]),
        salt=st.sampled_from([None, None, "tenant", "another"]),
        salt_from=st.none() | st.integers(0, 3),
        kind=st.sampled_from(
            ["plain", "plain", "plain", "speculative", "samples", "samples' prompt"]
        ),
    )
    def arrive(
        self,
        system: list[int],
        names: list[str],
        question: int,
        question_tokens: int,
        history: int | None,
        annotated: bool,
        extra_key: str | None,
        salt: str | None,
        salt_from: int | None,
        kind: str,
    ) -> None:
        prompt = list(system)
        if history is not None and self.ended:
            prompt = list(self.ended[history % len(self.ended)])
        spans = []
        for name in names:
            if len(prompt) + len(DOCUMENTS[name]) > DEVICE_TOKENS // 2:
                break
            spans.append((name, len(prompt), len(prompt) + len(DOCUMENTS[name])))
            prompt += DOCUMENTS[name]
        prompt += range(9_000 + 100 * question, 9_000 + 100 * question + question_tokens)
        if not annotated:
            spans = []
        if salt_from is not None:
            salt_from = min(salt_from, len(spans))
        req = self.h.request(
            prompt,
            spans,
            n=2 if kind.startswith("samples") else 1,
            max_new_tokens=0 if kind == "samples' prompt" else 8,
            speculative=kind == "speculative",
            extra_key=extra_key,
            cache_salt=salt,
            salt_from=salt_from,
        )
        shared_tokens = 0
        if salt is not None and salt_from is not None and spans:
            shared_tokens = spans[salt_from - 1][2] if salt_from else spans[0][1]
        guess = kind == "speculative" and bool(spans)
        if guess:
            self.h.tree.speculations.start(req)
        self.flights.append(
            Flight(
                req,
                prompt,
                spans,
                extra_key,
                salt,
                shared_tokens,
                self._floor(shared_tokens),
                kind != "samples",
                guess,
            )
        )

    def _pick(self, index: int, *phases: str) -> Flight | None:
        flights = [flight for flight in self.flights if flight.phase in phases]
        return flights[index % len(flights)] if flights else None

    @in_phase("waiting")
    @rule(index=st.integers(0, 3))
    def match_for_the_queue(self, index: int) -> None:
        if flight := self._pick(index, "waiting"):
            flight.req.init_next_round_input(self.h.tree)

    @in_phase("waiting")
    @rule(index=st.integers(0, 3), pin=st.sampled_from(["device", "host", "both"]))
    def match_and_pin(self, index: int, pin: str) -> None:
        """Match as admission does ("both") or a storage prefetch ("host"), and let other
        things happen before the load-back."""
        if flight := self._pick(index, "waiting"):
            tree, req = self.h.tree, flight.req
            req.init_next_round_input(tree)
            if pin != "host":
                lock = tree.lock(req.last_node)
                flight.pins.append(lambda: tree.unlock(lock))
            if pin != "device" and tree.cache_controller is not None:
                node = req.best_match_node
                receipt = tree.inc_host_lock_ref(node).to_dec_params()
                flight.pins.append(lambda: tree.dec_host_lock_ref(node, receipt))
            flight.phase = "pinned"

    @in_phase("waiting", "pinned")
    @rule(index=st.integers(0, 3), tokens=st.sampled_from([16, 32, 48, None]), poll=st.booleans())
    def admit(self, index: int, tokens: int | None, poll: bool) -> None:
        """Load back, and compute the first chunk."""
        if flight := self._pick(index, "waiting", "pinned"):
            self._admit(flight, tokens)
            if poll:
                self.h.poll()

    def _admit(self, flight: Flight, tokens: int | None) -> None:
        req, tree = flight.req, self.h.tree
        nodes = tree.tree_core._node_arena
        matched = [nodes.get(node_id) for node_id in (req.last_node, req.best_match_node)]
        if flight.phase == "waiting" or None in matched or matched[0].evicted:
            self._unpin(flight)
            req.init_next_round_input(tree)
        self.h.load_back(req)
        lock = tree.lock(req.last_node)
        self._unpin(flight)
        if self._makes_room(req, tokens):
            self.h.start(req)
            self.h.compute(req, tokens)
            flight.phase = "computed"
        else:
            tree.ready_to_load_host_cache()
            flight.phase = "waiting"
        tree.unlock(lock)

    def _unpin(self, flight: Flight) -> None:
        while flight.pins:
            flight.pins.pop()()

    def _makes_room(self, req: Any, tokens: int | None) -> bool:
        """Evict as the next `tokens` of `req` will; False when too much is locked."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        missing = len(req.full_untruncated_fill_ids) - req.prefix_len
        wanted = (missing if tokens is None else min(tokens, missing)) + 2 * self.page_size
        evict_from_tree_cache(self.h.tree, wanted)
        return self.h.allocator.available_size() >= wanted

    @in_phase("running")
    @rule(index=st.integers(0, 3), tokens=st.sampled_from([16, 32, 48, None]))
    def compute(self, index: int, tokens: int | None) -> None:
        flight = self._pick(index, "running")
        if flight and not self._is_decoding(flight) and self._makes_room(flight.req, tokens):
            self.h.compute(flight.req, tokens)
            flight.phase = "computed"

    @in_phase("computed")
    @rule(index=st.integers(0, 3))
    def publish(self, index: int) -> None:
        if flight := self._pick(index, "computed"):
            self.h.publish(flight.req)
            self._inserted(flight, flight.req.extend_end)
            flight.phase = "running"

    @in_phase("running")
    @rule(index=st.integers(0, 3), token=st.integers(7_000, 7_001))
    def decode(self, index: int, token: int) -> None:
        flight = self._pick(index, "running")
        if flight and self._is_decoding(flight) and self._makes_room(flight.req, 1):
            self.h.decode(flight.req, token)
            flight.tokens_since_prefill += 1

    @staticmethod
    def _is_decoding(flight: Flight) -> bool:
        known = len(flight.prompt) + len(flight.req.output_ids) - flight.tokens_since_prefill
        return flight.req.extend_end == known

    @in_phase("running", "computed")
    @rule(index=st.integers(0, 3), aborted=st.sampled_from([False, False, True]))
    def finish(self, index: int, aborted: bool) -> None:
        flight = self._pick(index, "running", "computed")
        if flight and self._is_decoding(flight):
            self._end(flight, aborted=aborted, checkpoint=True)

    @in_phase("waiting", "pinned", "running", "computed")
    @rule(index=st.integers(0, 3))
    def abort(self, index: int) -> None:
        if flight := self._pick(index, "waiting", "pinned", "running", "computed"):
            self._end(flight, aborted=True)

    def _end(self, flight: Flight, *, aborted: bool, checkpoint: bool = False) -> None:
        self.flights.remove(flight)
        self._unpin(flight)
        req = flight.req
        if checkpoint:
            if not flight.tokens_since_prefill and req.sampling_params.max_new_tokens:
                req.output_ids.append(7_000)
            self.h.finish(req, aborted=aborted)
            self._inserted(flight, len(flight.prompt) + max(len(req.output_ids) - 1, 0))
            if flight.guess and not aborted:
                self.answered.append(flight)
            self.ended = [[*flight.prompt, *req.output_ids], *self.ended][:8]
        else:
            self.h.tree.speculations.aborted(req)
            if flight.phase in ("running", "computed"):
                self.h.drop(req)

    @in_phase("running", "computed")
    @rule(index=st.integers(0, 3))
    def retract(self, index: int) -> None:
        if flight := self._pick(index, "running", "computed"):
            self.h.drop(flight.req)
            flight.req.reset_for_retract()
            flight.was_published = max(flight.was_published, flight.published)
            flight.phase, flight.tokens_since_prefill, flight.published = "waiting", 0, 0

    @precondition(lambda self: any(flight.guess for flight in self.flights))
    @rule(index=st.integers(0, 3))
    def promote(self, index: int) -> None:
        guesses = [flight for flight in self.flights if flight.guess]
        flight = guesses[index % len(guesses)]
        flight.guess = False
        assert self.h.tree.speculations.promote(flight.req.rid) == "running"
        if flight.published:
            self._count(flight, flight.published)
        elif flight.was_published and flight.phase in ("running", "computed"):
            # Retracted and admitted again: what it has found counts.
            path = self.h.tree.tree_core.path_to(flight.req.last_node)
            whole = flight.was_published >= self._floor(len(flight.prompt))
            self._count(flight, sum(len(node.key) for node in path), whole=whole)

    @precondition(lambda self: self.answered)
    @rule(index=st.integers(0, 7))
    def promote_what_has_ended(self, index: int) -> None:
        flight = self.answered.pop(index % len(self.answered))
        flight.guess = False
        for _ in range(2):
            assert self.h.tree.speculations.promote(flight.req.rid) == "finished"
        self._count(flight, flight.published, whole=True)

    @rule(names=st.lists(st.sampled_from(sorted(DOCUMENTS)), min_size=1, max_size=3))
    def serve_at_once(self, names: list[str]) -> None:
        if len(self.flights) == IN_FLIGHT:
            return
        self.arrive(SYSTEMS[2], names, 0, 5, None, True, None, None, None, "plain")
        flight = self.flights[-1]
        self._admit(flight, None)
        if flight.phase == "waiting":
            self._end(flight, aborted=True)
            return
        self.publish(len([f for f in self.flights if f.phase == "computed"]) - 1)
        for token in (7_000, 7_001, 7_002):
            if self._makes_room(flight.req, 1):
                self.h.decode(flight.req, token)
                flight.tokens_since_prefill += 1
        self._end(flight, aborted=False, checkpoint=True)

    @rule(tokens=st.integers(1, 120))
    def evict(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        evictable = self.h.tree.evictable_size()
        evicted = self.h.tree.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted
        pinned = any(flight.pins for flight in self.flights)
        # Only what lies above a pinned or loading host copy may refuse.
        if not pinned and not self.h.tree.ongoing_load_back:
            assert evicted >= min(tokens, evictable)

    @rule(tokens=st.integers(1, 120))
    def evict_host(self, tokens: int) -> None:
        if self.h.tree.cache_controller is not None:
            self.h.tree.evict_host(tokens)

    @rule()
    def poll(self) -> None:
        self.h.poll()

    @rule()
    def copies_end(self) -> None:
        self._finish_copies()

    def _finish_copies(self) -> None:
        self.h.finish_copies()
        self.h.poll()

    @precondition(lambda self: not self.flights and self.requests % 5 == 4)
    @rule()
    def flush(self) -> None:
        self.h.poll()
        self._finish_copies()
        self.check_idle()
        self.h.tree.reset()
        self.h.allocator.clear()
        self.retrievals.clear()
        self.named_paths.clear()
        self.occurrences.clear()
        self.read.clear()
        for flight in self.answered:
            flight.published = 0
        self.clocks = [0.0, 0.0]
        self.removed = False
        self.evicted_before = self.h.tree.component.device.evicted_nodes

    # The model

    def _floor(self, tokens: int) -> int:
        return tokens // self.page_size * self.page_size

    def _inserted(self, flight: Flight, up_to: int) -> None:
        end = self._floor(up_to)
        for name, first, last in flight.spans[: self.max_depth]:
            first, last = self._floor(first), self._floor(last)
            if first < last <= end:
                place = flight.place(last)
                self.occurrences.setdefault(place, set()).add((name, last - first))
        flight.published = end
        if flight.counts and not flight.guess:
            self._count(flight, end)

    def _count(self, flight: Flight, end: int, *, whole: bool = False) -> None:
        prompt = flight.prompt
        self.requests += not flight.is_counted
        flight.is_counted = True
        whole = whole or end >= self._floor(len(prompt))
        for span in flight.spans[flight.counted_documents :]:
            if not whole and self._floor(span[1]) >= end:
                break
            key = DocumentKey(span[0], "", flight.extra_key, flight.salt_of(span))
            self.retrievals[key] += 1
            if self.max_depth is None or flight.counted_documents < self.max_depth:
                self.named_paths.add(flight.named_path(span))
            flight.counted_documents += 1
        counted = min(end, self._floor(len(prompt)))
        if counted > flight.inserted:
            flight.inserted = counted
            self.read = [entry for entry in self.read if entry[1] is not flight]
            self.read.append((counted, flight))

    # Invariants

    @invariant()
    def count_step(self) -> None:
        type(self).steps += 1

    @invariant()
    def check_tree(self) -> None:
        self.h.check()
        self._check_counts()
        self._check_tiers()
        for node in self.h.nodes():
            self._check_node(node)
        for flight in self.flights:
            if flight.phase in ("running", "computed"):
                self._check_flight(flight)

    def _check_counts(self) -> None:
        tree = self.h.tree
        assert tree.counters.requests == self.requests
        assert sum(flight.guess for flight in self.flights) <= len(tree.speculations.in_flight)
        assert dict(tree.document_frequencies._counts) == dict(self.retrievals)
        state = orjson.loads(orjson.dumps(tree.report()))
        assert state["known_documents"] == len(self.retrievals)
        if tree.settings.policy.uses_history:
            # Whatever has left the tree in between.
            histories = tree.histories._histories.values()
            known = len(self.named_paths)
            assert len(histories) == (known if self.ghosts is None else min(known, self.ghosts))
            assert self.ghosts is None or len(tree.histories._topics) <= self.ghosts
            assert all(0 < each.uses <= each.topic.uses for each in histories)
            assert min(map(min, tree.histories.model._counts)) > -1e-6

    def _check_tiers(self) -> None:
        tree = self.h.tree
        core = tree.tree_core
        tiers = [
            (tree.component.device, core.evictable_device_leaves),
            (tree.component.host, core.evictable_host_leaves),
        ]
        for tier, leaves in tiers:
            assert tier.clock.evicted >= self.clocks[tier.name]
            self.clocks[tier.name] = tier.clock.evicted
            offered = {(floor, node_id) for floor, node_id, _ in tier._heap}
            assert all((leaf.ranks[tier.name].floor, leaf.id) in offered for leaf in leaves)
        self.removed |= tree.component.device.evicted_nodes > self.evicted_before

    def _check_node(self, node: Any) -> None:
        tree = self.h.tree
        path = tree.tree_core.path_to(node.id)
        tokens = tuple(token for above in path for token in above.key.token_ids)
        salt = node.key.cache_salt
        shared = sum(len(above.key) for above in path if above.key.cache_salt is None)
        assert {above.key.cache_salt for above in path} <= {None, salt}
        place = Place(node.key.extra_key, salt, 0 if salt is None else shared, tokens)
        allowed = self.occurrences.get(place, set())
        for occurrence in node.occurrences:
            assert (occurrence.document.id, occurrence.tokens) in allowed
        if not self.removed:
            readers = sum(
                counted >= len(tokens) and flight.place(len(tokens)) == place
                for counted, flight in self.read
            )
            assert node.statistics.frequency == readers

    def _check_flight(self, flight: Flight) -> None:
        tree, req = self.h.tree, flight.req
        path = tree.tree_core.path_to(req.last_node)
        bounds, end = {0: None}, 0
        for node in path:
            assert not node.evicted, "a running request lost a part of its prefix"
            assert node.component_data[FULL].lock_ref > 0
            end += len(node.key)
            bounds[end] = node
        computed = max(req.prefix_len, req.kv.kv_committed_len)
        row = self.h.rows.req_to_token[req.kv.req_pool_idx, :computed].long()
        self.h.check_kv(req.full_untruncated_fill_ids, row)
        published = req.kv.cache_inserted_len
        for name, first, last in flight.spans[: self.max_depth]:
            first, last = self._floor(first), self._floor(last)
            if first < last <= published:
                named = {(o.document.id, o.tokens) for o in bounds[last].occurrences}
                assert (name, last - first) in named
                assert first in bounds

    def check_idle(self) -> None:
        if not self.flights:
            assert not self.h.tree.speculations.in_flight
            assert self.h.tree.protected_size() == 0
            for node in self.h.nodes():
                data = node.component_data[FULL]
                assert (data.lock_ref, data.host_lock_ref) == (0, 0)


_SETTINGS = settings(
    deadline=None,
    database=None,
    derandomize=True,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def test_the_tree_stays_right_whatever_the_scheduler_does():
    run_state_machine_as_test(
        TreeMachine, settings=settings(_SETTINGS, max_examples=100, stateful_step_count=50)
    )


@pytest.mark.slow
def test_the_tree_stays_right_over_a_hundred_thousand_steps(monkeypatch):
    runs = 1500  # some end before their hundred steps
    monkeypatch.setattr(TreeMachine, "steps", 0)
    run_state_machine_as_test(
        TreeMachine,
        settings=settings(
            _SETTINGS,
            max_examples=runs,
            stateful_step_count=100,
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    assert TreeMachine.steps - runs >= 100_000
