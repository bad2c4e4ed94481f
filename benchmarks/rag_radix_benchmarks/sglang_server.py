"""An SGLang server in a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rag_radix.profile.server import ProfiledServer
from rag_radix_benchmarks.facts import Counters, ServerFacts, read_counters, read_facts
from rag_radix_benchmarks.load import Run, closed_loop, open_loop


@dataclass(frozen=True)
class SGLangServer:
    """A running server, asked through `/generate`."""

    url: str
    facts: ServerFacts

    @classmethod
    def at(cls, url: str) -> SGLangServer:
        """Ask what it is.

        Raises:
            WrongArmError: It doesn't say.
        """
        return cls(url, read_facts(url))

    def empty(self) -> None:
        """Wait until nothing runs and empty the cache.

        Raises:
            ProfileError: Others use the server.
        """
        control = ProfiledServer(self.url)
        control.wait_until_idle()
        control.flush()

    def open_loop(self, bodies: Sequence[dict[str, Any]], due_s: Sequence[float]) -> Run:
        return open_loop(self.url, bodies, due_s)

    def closed_loop(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> Run:
        return closed_loop(self.url, bodies, concurrency)

    def vocabulary(self) -> list[int]:
        """Token ids that prompts are made of."""
        return ProfiledServer(self.url).vocabulary()

    def counters(self) -> Counters:
        """What it has counted up to now."""
        return read_counters(self.url)
