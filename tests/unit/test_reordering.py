"""Who is served next: the paper's examples, ties, priorities, speculations, and the bound."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from rag_radix.cost_model import PrefillCostTable
from rag_radix.reordering import ServingOrder, Waiting, load_share, reuse_score


def queue(*scores: float, **fields: object) -> list[Waiting]:
    return [
        Waiting(arrival, score=score, **fields)  # type: ignore[arg-type]
        for arrival, score in enumerate(scores)
    ]


def arrivals(requests: Sequence[Waiting]) -> list[int]:
    return [request.arrival for request in requests]


def test_the_highest_share_of_reuse_goes_first():
    assert arrivals(ServingOrder(32).arrange(queue(0.5, 3.0, 1.0, 2.0))) == [1, 3, 2, 0]


def test_ties_go_by_arrival_in_whatever_order_the_queue_is():
    waiting = queue(1.0, 1.0, 2.0, 1.0)
    assert arrivals(ServingOrder(32).arrange(reversed(waiting))) == [2, 0, 1, 3]


def test_an_empty_queue_has_an_empty_order():
    assert ServingOrder(32).arrange([]) == []


def test_a_window_of_none_serves_in_the_order_of_arrival():
    assert arrivals(ServingOrder(0).arrange(queue(0.0, 9.0, 5.0))) == [0, 1, 2]


def test_a_request_is_placed_once_it_would_have_been_overtaken_as_often_as_allowed():
    order = ServingOrder(2).arrange(queue(0.0, 1.0, 2.0, 3.0, 4.0))
    assert arrivals(order) == [4, 3, 0, 1, 2]


def test_overtakings_are_remembered_from_pass_to_pass():
    order = ServingOrder(2)
    first, second, third, fourth = queue(0.0, 1.0, 2.0, 3.0)
    for best in (second, third):
        assert order.arrange([first, best])[0] is best
        order.serve(best)
    assert order.overtaken(first) == 2
    assert order.arrange([first, fourth])[0] is first
    assert order.most_overtakings == 2


def test_what_is_served_past_a_skipped_request_counts_at_once():
    order = ServingOrder(1)
    first, second, third = queue(0.0, 1.0, 0.5)
    assert order.arrange([first, second, third]) == [second, first, third]
    order.serve(second)
    assert order.may_be_served(first)
    assert not order.may_be_served(third)
    order.serve(first)
    assert order.may_be_served(third)


def test_who_has_gone_without_being_served_has_not_overtaken():
    order = ServingOrder(2)
    first, second, third, fourth = queue(0.0, 3.0, 2.0, 1.0)
    order.arrange([first, second, third, fourth])
    order.serve(second)
    order.arrange([first, fourth])  # the third was aborted
    assert order.overtaken(first) == 1
    assert arrivals(order.arrange([first, fourth])) == [3, 0]


def test_priorities_come_first_and_overtake_nobody():
    order = ServingOrder(1)
    low, high, higher = Waiting(0, 1, score=9.0), Waiting(1, 0, score=0.0), Waiting(2, 0, score=1.0)
    assert order.arrange([low, high, higher]) == [higher, high, low]
    order.serve(higher)
    order.serve(high)
    order.arrange([low])
    assert order.overtaken(low) == 0


def test_speculations_are_last_and_overtake_nobody():
    order = ServingOrder(1)
    speculation = Waiting(0, speculative=True, score=9.0)
    first, second = Waiting(1, score=0.0), Waiting(2, score=1.0)
    assert order.arrange([speculation, first, second]) == [second, first, speculation]
    order.serve(second)
    order.serve(first)
    order.serve(speculation)
    assert (order.overtaken(first), order.overtaken(speculation)) == (0, 0)


def test_a_held_request_waits_for_all_others_but_not_longer_than_its_window():
    waiting = [Waiting(0, score=9.0, held=True), *queue(0.0, 0.0, 0.0, 0.0)[1:]]
    assert arrivals(ServingOrder(9).arrange(waiting)) == [1, 2, 3, 0]
    assert arrivals(ServingOrder(2).arrange(waiting)) == [1, 2, 0, 3]


def test_held_requests_leave_the_others_their_choice():
    held = [Waiting(arrival, held=True) for arrival in range(9)]
    order = ServingOrder(3).arrange([*held, Waiting(9, score=1.0), Waiting(10, score=2.0)])
    assert arrivals(order)[:2] == [10, 9]


def test_loading_counts_as_a_share_of_computing():
    assert reuse_score(300, 0, 100) == 3.0
    assert reuse_score(0, 300, 100, load_share=0.0) == 3.0
    assert reuse_score(0, 300, 100, load_share=1.0) == 0.0
    assert reuse_score(300, 0, 100, 0.1) > reuse_score(0, 300, 100, 0.1) > reuse_score(200, 0, 200)


def test_the_share_is_of_a_token_more_and_never_above_one():
    cost = PrefillCostTable((0, 8192), (1, 8192), ((1.0, 9.0), (1.0, 9.0)))
    second_per_token = 8 / 8191
    assert load_share(cost, second_per_token / 4) == pytest.approx(0.25)
    assert load_share(cost, 2 * second_per_token) == 1.0


# The examples of RAGCache's section on cache-aware reordering


def test_two_documents_in_turn_with_room_for_one_are_found_two_times_in_three():
    def hits(window: int) -> int:
        order, cached, found = ServingOrder(window), None, 0
        waiting = {Waiting(arrival): "AB"[arrival % 2] for arrival in range(6)}
        while waiting:
            for request, document in waiting.items():
                request.score = reuse_score(*((4, 0, 1) if document == cached else (0, 0, 5)))
            request = order.arrange(waiting)[0]
            order.serve(request)
            document = waiting.pop(request)
            found += document == cached
            cached = document
        return found

    assert hits(window=0) == 0
    assert hits(window=32) == 4


@dataclass
class Prompt:
    """`cached` tokens of it are cached, `new` aren't."""

    cached: int
    new: int


def cost(order: Sequence[int], prompts: Sequence[Prompt], capacity: int) -> int:
    """Tokens computed, when what one request needs pushes out what another would find."""
    cache = OrderedDict((index, prompt.cached) for index, prompt in enumerate(prompts))
    computed = 0
    for index in order:
        prompt = prompts[index]
        computed += prompt.cached + prompt.new - cache.pop(index, 0)
        others = capacity - prompt.cached - prompt.new
        while sum(cache.values()) > others:
            cache.popitem(last=False)
        cache[index] = prompt.cached + prompt.new
    return computed


@pytest.mark.parametrize(
    ("prompts", "capacity", "best", "worst"),
    [
        # The same to compute: the one that would lose more goes first.
        ([Prompt(1, 2), Prompt(2, 2)], 4, 5, 6),
        # The same to lose: the one that takes less room goes first.
        ([Prompt(2, 2), Prompt(2, 1)], 5, 3, 5),
    ],
)
def test_the_order_is_the_cheaper_one_of_the_papers_examples(prompts, capacity, best, worst):
    scores = [reuse_score(prompt.cached, 0, prompt.new) for prompt in prompts]
    chosen = arrivals(ServingOrder(32).arrange(queue(*scores)))
    assert cost(chosen, prompts, capacity) == best
    assert cost(chosen[::-1], prompts, capacity) == worst


# Long queues


def test_nobody_starves_among_ten_thousand_requests():
    """Arrivals keep up with the server, and what arrives always looks better."""
    order, rng, window = ServingOrder(16), random.Random(7), 16
    waiting: list[Waiting] = []
    served: list[Waiting] = []
    overtakings: dict[int, int] = {}
    for arrival in range(10_000):
        waiting.append(Waiting(arrival, score=arrival * rng.random()))
        overtakings[arrival] = 0
        if len(waiting) > 100:
            (best, *_) = order.arrange(waiting)
            assert order.may_be_served(best)
            order.serve(best)
            waiting.remove(best)
            served.append(best)
            for request in waiting:
                overtakings[request.arrival] += best.arrival > request.arrival
    assert max(overtakings.values()) == order.most_overtakings == window
    assert len(served) == 10_000 - 100
    late = [position - request.arrival for position, request in enumerate(served)]
    assert max(late) <= window


class Compared(float):
    """A number that counts how often any of them is compared."""

    times = 0

    def __neg__(self) -> Compared:
        return Compared(-float(self))

    def __lt__(self, other: float) -> bool:
        Compared.times += 1
        return float(self) < float(other)


@pytest.mark.parametrize("window", [1, 32, 10_000])
def test_a_queue_of_n_is_ordered_in_n_log_n_steps(window):
    rng = random.Random(4)
    requests = [Waiting(Compared(i), score=Compared(rng.random())) for i in range(4_000)]
    rng.shuffle(requests)
    Compared.times = 0
    ServingOrder(window).arrange(requests)
    assert Compared.times < 3 * 4_000 * math.log2(4_000)


def test_in_a_long_queue_nobody_comes_from_far_behind():
    rng = random.Random(3)
    requests = [Waiting(arrival, score=rng.random()) for arrival in range(1_000)]
    order = ServingOrder(8).arrange(requests)
    ahead = [request.arrival - position for position, request in enumerate(order)]
    assert 8 < max(ahead) < 8 * 8
    assert min(ahead) == -8
