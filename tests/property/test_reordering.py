"""Whatever comes, is served, skipped or aborted: nobody is overtaken more often than allowed."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from rag_radix.reordering import ServingOrder, Waiting

SCORES = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 9.0])


@dataclass(frozen=True)
class Pass:
    """What happens between one order of the queue and the next.

    Attributes:
        arriving: Score, priority, and whether it is speculative, held.
        aborted: Positions in the queue, modulo its length.
        rescored: The same, with the score it has from now on.
        offered: Whether each of the first requests of the order is served if it may be.
    """

    arriving: list[tuple[float, int, bool, bool]]
    aborted: list[int]
    rescored: list[tuple[int, float, bool]]
    offered: list[bool]


PASSES = st.lists(
    st.builds(
        Pass,
        arriving=st.lists(
            st.tuples(SCORES, st.integers(0, 1), st.booleans(), st.booleans()), max_size=6
        ),
        aborted=st.lists(st.integers(0, 99), max_size=2),
        rescored=st.lists(st.tuples(st.integers(0, 99), SCORES, st.booleans()), max_size=3),
        offered=st.lists(st.booleans(), max_size=8),
    ),
    max_size=30,
)


def overtakes(served: Waiting, waiting: Waiting) -> bool:
    return (
        not (served.speculative or waiting.speculative)
        and served.priority == waiting.priority
        and served.arrival > waiting.arrival
    )


@settings(max_examples=150, deadline=None)
@given(window=st.integers(0, 5), passes=PASSES)
def test_nobody_is_overtaken_more_often_than_allowed(window: int, passes: list[Pass]) -> None:
    order, queue, overtakings = ServingOrder(window), [], {}
    arrival = 0
    for each in passes:
        for score, priority, speculative, held in each.arriving:
            queue.append(Waiting(arrival, priority, speculative, score, held))
            overtakings[arrival] = 0
            arrival += 1
        for position in each.aborted[: len(queue)]:
            del queue[position % len(queue)]
        for position, score, held in each.rescored if queue else ():
            queue[position % len(queue)].score = score
            queue[position % len(queue)].held = held
        queue = order.arrange(queue)

        kinds = [(request.speculative, request.priority) for request in queue]
        assert kinds == sorted(kinds)
        assert [order.overtaken(request) for request in queue] == [
            overtakings[request.arrival] for request in queue
        ]
        skipped = False
        for request, is_offered in zip(tuple(queue), each.offered, strict=False):
            if is_offered and order.may_be_served(request):
                order.serve(request)
                queue.remove(request)
                for other in queue:
                    overtakings[other.arrival] += overtakes(request, other)
            else:
                # In its own order the queue may be served to its end.
                assert skipped or not is_offered or request.speculative
                skipped = True
    assert order.most_overtakings <= window
    assert max(overtakings.values(), default=0) == order.most_overtakings


@settings(max_examples=50, deadline=None)
@given(
    window=st.integers(0, 4),
    scores=st.lists(SCORES, max_size=60),
    reverse=st.booleans(),
)
def test_an_order_has_everybody_once_and_the_best_of_those_that_may_be_chosen_first(
    window: int, scores: list[float], reverse: bool
) -> None:
    queue = [Waiting(arrival, score=score) for arrival, score in enumerate(scores)]
    order = ServingOrder(window).arrange(queue[::-1] if reverse else queue)
    left = list(queue)
    for position, request in enumerate(order):
        overtaken = sum(earlier.arrival > left[0].arrival for earlier in order[:position])
        near = left[:1] if overtaken == window else left[: 8 * window]
        assert request is min(near, key=lambda other: (-other.score, other.arrival))
        left.remove(request)
    assert not left
