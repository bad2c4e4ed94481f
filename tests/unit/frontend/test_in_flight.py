from __future__ import annotations

import gc
import threading

import pytest
from rag_radix_frontend.errors import RequestAborted
from rag_radix_frontend.in_flight import InFlight
from unit.frontend.speculative_server import WAIT_S, eventually, no_more_threads

pytestmark = pytest.mark.usefixtures("no_threads_left")


class State:
    pass


class Server:
    """Lets go of a request when it has been told to often enough."""

    def __init__(self, deaf: int = 0, broken: bool = False) -> None:
        self.told: list[str] = []
        self._deaf = deaf
        self._broken = broken
        self.gone = threading.Event()

    def abort(self, rid: str) -> None:
        self.told.append(rid)
        if len(self.told) > self._deaf:
            self.gone.set()
        if self._broken:
            raise ConnectionRefusedError


def request(in_flight: InFlight, state: State, server: Server) -> threading.Thread:
    """A request that is at the server now."""
    arrived = threading.Event()

    def run() -> None:
        with in_flight.sending(state, 1):
            arrived.set()
            server.gone.wait(WAIT_S)

    thread = threading.Thread(target=run)
    thread.start()
    arrived.wait(WAIT_S)
    return thread


def test_every_request_of_a_batch_has_its_own_id() -> None:
    with InFlight(lambda rid: None).sending(State(), 3) as ticket:
        assert len(set(ticket.rids)) == 3
        assert {len(rid) for rid in ticket.rids} == {32}
        assert not ticket.speculative


@pytest.mark.parametrize("server", [Server(), Server(deaf=2), Server(broken=True)])
def test_cancelling_tells_the_server_until_it_has_let_go(server: Server) -> None:
    in_flight, state = InFlight(server.abort), State()
    thread = request(in_flight, state, server)
    in_flight.cancel(state)
    assert server.gone.is_set()
    thread.join()
    with pytest.raises(RequestAborted), in_flight.sending(state, 1):
        pass


def test_discarding_does_not_wait() -> None:
    server = Server(deaf=3)
    in_flight, state = InFlight(server.abort), State()
    thread = request(in_flight, state, server)
    in_flight.discard(state)
    assert len(server.told) < 4
    thread.join()
    assert set(server.told) == {server.told[0]}


def requests(servers: list[Server]) -> tuple[InFlight, list[State], list[threading.Thread]]:
    """A request at each of `servers`, of a state of its own."""
    by_rid: dict[str, Server] = {}
    in_flight = InFlight(lambda rid: by_rid[rid].abort(rid))
    states = [State() for _ in servers]
    threads = []
    for state, server in zip(states, servers, strict=True):
        threads.append(request(in_flight, state, server))
        by_rid[next(iter(in_flight._of[state].rids))] = server
    return in_flight, states, threads


def test_many_are_discarded_by_one_thread_and_each_is_told_once() -> None:
    servers = [Server() for _ in range(20)]
    in_flight, states, threads = requests(servers)
    for state in states:
        in_flight.discard(state)
    for thread in threads:
        thread.join()
    assert all(len(server.told) == 1 for server in servers)


def test_what_no_thread_could_be_started_to_end_ends_with_the_next() -> None:
    servers = [Server(), Server()]
    in_flight, states, threads = requests(servers)
    with no_more_threads():
        in_flight.discard(states[0])
    assert servers[0].told == []
    in_flight.discard(states[1])
    for thread, server in zip(threads, servers, strict=True):
        assert server.gone.wait(WAIT_S)
        thread.join()


def test_speculations_are_marked_until_they_are_made_ordinary() -> None:
    in_flight, state, copy = InFlight(lambda rid: None), State(), State()
    in_flight.speculate(state, copy)
    with in_flight.sending(copy, 2) as before:
        assert before.speculative
    assert in_flight.make_ordinary(copy) == before.rids
    with in_flight.sending(copy, 1) as after:
        assert not after.speculative


def test_cancelling_a_state_ends_its_speculations_and_allows_no_more() -> None:
    server = Server()
    in_flight, state, copy = InFlight(server.abort), State(), State()
    in_flight.speculate(state, copy)
    thread = request(in_flight, copy, server)
    in_flight.cancel(state)
    thread.join()
    with pytest.raises(RequestAborted), in_flight.sending(copy, 1):
        pass
    with pytest.raises(RequestAborted):
        in_flight.speculate(state, State())


def test_states_are_forgotten_with_their_programs() -> None:
    in_flight = InFlight(lambda rid: None)
    for _ in range(10):
        state, copy = State(), State()
        in_flight.speculate(state, copy)
        with in_flight.sending(state, 1), in_flight.sending(copy, 1):
            pass
        in_flight.discard(copy)
    del state, copy
    gc.collect()
    eventually(lambda: not in_flight._of)


def test_what_has_failed_is_not_to_be_promoted() -> None:
    in_flight, state, copy = InFlight(lambda rid: None), State(), State()
    in_flight.speculate(state, copy)
    with pytest.raises(ConnectionResetError), in_flight.sending(copy, 1):
        raise ConnectionResetError
    with in_flight.sending(copy, 1) as again:
        assert in_flight.make_ordinary(copy) == again.rids
