"""The servers of a comparison: started when an arm is measured, kept while there is room."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from rag_radix.environment import COMPARISON
from rag_radix.launch import exiting_on_termination, serving
from rag_radix_benchmarks.arms import Arm
from rag_radix_benchmarks.completions import CompletionServer
from rag_radix_benchmarks.facts import ServerFacts
from rag_radix_benchmarks.setup import Setup
from rag_radix_benchmarks.sglang_server import SGLangServer
from rag_radix_benchmarks.verify import verify, verify_alike

# A server grows while it serves.
MEMORY_MARGIN = 1.5
# SGLang refuses a host tier that would leave less than this.
HOST_TIER_LEAVES_BYTES = 10 * 2**30

ArmServer = SGLangServer | CompletionServer


class Servers:
    """Starts servers and stops them, the one not used for longest first.

    Args:
        setup: What all have in common.
        limit: How many may run at the same time; None for as many as fit into memory, judged by
            the largest so far.
        logs: Folder for their output; None to drop it.
    """

    def __init__(self, setup: Setup, limit: int | None, logs: Path | None) -> None:
        self._setup = setup
        self._limit = limit
        self._logs = logs
        self._needed_bytes = 0
        self._verified: list[tuple[Arm, ServerFacts]] = []
        self._running: dict[str, tuple[ArmServer, ExitStack]] = {}
        self._termination: AbstractContextManager[None] = exiting_on_termination()

    def __enter__(self) -> Self:
        self._termination.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._running:
            self._stop_oldest()
        self._termination.__exit__(kind, error, trace)

    def of(self, arm: Arm) -> ArmServer:
        """The server of an arm, verified.

        Raises:
            LaunchError: It doesn't start.
            WrongArmError: It isn't what the arm says, or computes otherwise than those before it.
        """
        server: ArmServer
        if arm.name in self._running:
            # The last of a dict is the one used last.
            self._running[arm.name] = self._running.pop(arm.name)
            return self._running[arm.name][0]
        if arm.url is None:
            while self._running and self._is_full(arm):
                self._stop_oldest()
        with ExitStack() as stack:
            before = psutil.virtual_memory().available
            url = arm.url or stack.enter_context(self._start(arm))
            server = CompletionServer.at(url) if arm.is_peer else SGLangServer.at(url)
            verify(arm, self._setup, server.facts)
            for known, facts in self._verified:
                verify_alike(arm, server.facts, known, facts)
            self._verified.append((arm, server.facts))
            needed_bytes = before - psutil.virtual_memory().available
            self._needed_bytes = max(self._needed_bytes, needed_bytes)
            self._running[arm.name] = server, stack.pop_all()
        return self._running[arm.name][0]

    def _start(self, arm: Arm) -> AbstractContextManager[str]:
        name = "".join(letter if letter.isalnum() else "-" for letter in arm.name)
        return serving(
            self._setup.model_path,
            self._setup.flags(arm),
            program="sglang",
            environment={COMPARISON.name: "1"},
            log=None if self._logs is None else self._logs / f"{name}.log",
        )

    def _is_full(self, arm: Arm) -> bool:
        if self._limit is not None:
            return len(self._running) >= self._limit
        wanted = MEMORY_MARGIN * self._needed_bytes
        if arm.host_tier:
            wanted = max(wanted, self._needed_bytes + HOST_TIER_LEAVES_BYTES)
        available: int = psutil.virtual_memory().available
        return available < wanted

    def _stop_oldest(self) -> None:
        _, stack = self._running.pop(next(iter(self._running)))
        stack.close()
