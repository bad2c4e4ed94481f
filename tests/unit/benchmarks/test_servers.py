"""Which servers of a comparison run when; what is started here is only written down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rag_radix_benchmarks import servers as module
from rag_radix_benchmarks.arms import STOCK_ARMS
from rag_radix_benchmarks.facts import WrongArmError
from rag_radix_benchmarks.servers import Servers
from rag_radix_benchmarks.sglang_server import SGLangServer
from unit.benchmarks.comparison_data import SETUP, facts_of

LRU, LPM, HICACHE = (STOCK_ARMS[name] for name in ("stock-lru", "stock-lpm", "stock-hicache"))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    arms = {tuple(SETUP.flags(arm)): arm for arm in (LRU, LPM, HICACHE)}

    @contextmanager
    def serving(model_path: str, flags: list[str], **_: object) -> Iterator[str]:
        name = arms[tuple(flags)].name
        events.append(f"start {name}")
        try:
            yield name
        finally:
            events.append(f"stop {name}")

    monkeypatch.setattr(module, "serving", serving)
    monkeypatch.setattr(
        SGLangServer, "at", lambda url: SGLangServer(url, facts_of(STOCK_ARMS[url]))
    )
    return events


def test_servers_are_kept_and_all_stopped_at_the_end(events):
    with Servers(SETUP, limit=2, logs=None) as servers:
        assert servers.of(LRU).url == "stock-lru"
        servers.of(LPM)
        servers.of(LRU)
        assert events == ["start stock-lru", "start stock-lpm"]
    assert events[2:] == ["stop stock-lpm", "stop stock-lru"]


def test_the_server_not_used_for_longest_makes_room_before_another_starts(events):
    with Servers(SETUP, limit=2, logs=None) as servers:
        for arm in (LRU, LPM, LRU, HICACHE):
            servers.of(arm)
    assert events[:4] == [
        "start stock-lru",
        "start stock-lpm",
        "stop stock-lpm",
        "start stock-hicache",
    ]


def test_by_default_memory_is_the_limit(events, monkeypatch):
    available = iter([100, 60, 59, 59, 30])

    class Memory:
        @property
        def available(self) -> int:
            return next(available)

    monkeypatch.setattr(module.psutil, "virtual_memory", Memory)
    with Servers(SETUP, limit=None, logs=None) as servers:
        servers.of(LRU)  # takes 40 of 100: another needs 60 with the margin
        servers.of(LPM)
        assert events == ["start stock-lru", "stop stock-lru", "start stock-lpm"]


def test_a_host_tier_needs_what_sglang_keeps_free(events, monkeypatch):
    gib = 2**30
    available = iter([20 * gib, 19 * gib, 10 * gib, 10 * gib, 9 * gib])
    monkeypatch.setattr(
        module.psutil, "virtual_memory", lambda: SimpleNamespace(available=next(available))
    )
    with Servers(SETUP, limit=None, logs=None) as servers:
        servers.of(LRU)  # takes 1 of 20: another needs 1.5, or 11 with a host tier
        servers.of(HICACHE)
        assert events == ["start stock-lru", "stop stock-lru", "start stock-hicache"]


def test_a_server_that_is_not_its_arm_is_stopped(events, monkeypatch):
    monkeypatch.setattr(SGLangServer, "at", lambda url: SGLangServer(url, facts_of(HICACHE)))
    with Servers(SETUP, limit=2, logs=None) as servers:
        with pytest.raises(WrongArmError):
            servers.of(LRU)
        assert events == ["start stock-lru", "stop stock-lru"]


def test_a_failure_in_between_stops_what_runs(events, tmp_path: Path):
    def interrupted() -> None:
        with Servers(SETUP, limit=2, logs=tmp_path) as servers:
            servers.of(LRU)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert events == ["start stock-lru", "stop stock-lru"]
