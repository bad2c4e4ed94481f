"""Measures trials: empties and warms a server's cache, asks, and keeps what came of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rag_radix_benchmarks.arms import Arm
from rag_radix_benchmarks.progress import progress
from rag_radix_benchmarks.prompts import PromptWriter, request_body
from rag_radix_benchmarks.servers import ArmServer, Servers
from rag_radix_benchmarks.setup import Setup
from rag_radix_benchmarks.sglang_server import SGLangServer
from rag_radix_benchmarks.trials import ClosedLoop, Load, OpenLoop, Trial, TrialResult, TrialStore
from rag_radix_benchmarks.workload import Workload


class Experiment:
    """Arms of one setup under one workload.

    Args:
        setup: What all arms have in common.
        arms: All of them; one at least is of SGLang.
        workload: What they are asked.
        servers: Where.
        store: What was measured before isn't measured again.
        seed: Of the texts.
    """

    def __init__(
        self,
        setup: Setup,
        arms: Sequence[Arm],
        workload: Workload,
        servers: Servers,
        store: TrialStore,
        seed: int,
    ) -> None:
        self._setup = setup
        self._arms = arms
        self._workload = workload
        self._servers = servers
        self._store = store
        self._seed = seed
        self._vocabulary: list[int] = []
        self._part = functools.lru_cache(maxsize=1)(workload.part)
        self._bodies = functools.lru_cache(maxsize=1)(self._write)
        self._used: set[str] = set()

    def trial(self, arm: Arm, load: Load, repeat: int) -> Trial:
        return Trial(self._setup, arm, self._workload, load, repeat)

    def run(self, trial: Trial) -> TrialResult:
        """The result of a trial, which is measured unless it is known.

        Raises:
            LaunchError: A server doesn't start.
            WrongArmError: A server isn't what its arm says.
            LoadError: A server answers with an error.
            ProfileError: A server can't be emptied, or others use it.
        """
        known = self._store.get(trial)
        if known is not None:
            return known
        server = self._servers.of(trial.arm)
        result = self._measure(trial, server)
        self._store.add(trial, result)
        mean_s = sum(result.run.ttft_s) / len(result.run.ttft_s)
        hits = f"{result.run.token_hit_rate:.1%}" if result.run.hits_counted else "not counted"
        progress(f"{trial}: mean TTFT {mean_s:.3f} s, hit rate {hits}")
        return result

    def capacity(self, arm: Arm, repeat: int) -> float:
        """Requests a second of a repeat that an arm takes when its queue is never empty.

        Those of another repeat may be half as much work again.
        """
        run = self.run(self.trial(arm, ClosedLoop(self._busy), repeat)).run
        capacity = len(run.outcomes) / run.seconds
        progress(f"capacity of {arm.name}, repeat {repeat + 1}: {capacity:.3g} requests/s")
        return capacity

    @property
    def _busy(self) -> int:
        """Requests under way with which a server is never idle."""
        return 2 * self._setup.running_requests

    def _measure(self, trial: Trial, server: ArmServer) -> TrialResult:
        part = self._part(trial.repeat)
        self._vocabulary = self._vocabulary or self._read_vocabulary(server)
        warm_up, measured = self._bodies(trial.repeat)
        client = server if part.questions is None else self._programs(trial.arm, server)
        if server.url not in self._used:
            client.closed_loop(measured[:2], concurrency=1)  # what is slow on its first use
            self._used.add(server.url)
        server.empty()
        if warm_up:
            # Programs are threads, each with a search of its own.
            at_once = self._busy if part.questions is None else self._setup.running_requests
            client.closed_loop(warm_up, at_once)
        before = server.counters()
        if isinstance(trial.load, OpenLoop):
            run = client.open_loop(measured, part.due_s(trial.load.requests_per_s))
        else:
            run = client.closed_loop(measured, trial.load.concurrency)
        return TrialResult.of(run, server.facts, before, server.counters())

    def _programs(self, arm: Arm, server: ArmServer) -> Any:
        """Programs, which ask the server in place of the load's client."""
        # They bring Faiss along.
        from rag_radix_benchmarks.corpus import CorpusPrograms
        from rag_radix_benchmarks.program_client import ProgramClient

        assert isinstance(self._workload, CorpusPrograms)
        return ProgramClient(server.url, self._workload, arm)

    def _read_vocabulary(self, server: ArmServer) -> list[int]:
        """From the server at hand, or where that is a peer, from another one."""
        if isinstance(server, SGLangServer):
            return server.vocabulary()
        for arm in self._arms:
            other = self._servers.of(arm)
            if isinstance(other, SGLangServer):
                return other.vocabulary()
        raise AssertionError("every comparison has an SGLang server")

    def _write(self, repeat: int) -> tuple[Sequence[Any], Sequence[Any]]:
        """What is sent: bodies, or the questions of programs.

        A warm-up is there for the prompts, so that one token of output will do.
        """
        part = self._part(repeat)
        requests = (
            *(replace(request, output_tokens=1) for request in part.warm_up),
            *part.measured,
        )
        bodies: Sequence[Any]
        if part.questions is not None:
            bodies = part.questions
        elif part.prompts is not None:
            bodies = [
                request_body(request, ids)
                for request, ids in zip(requests, part.prompts, strict=True)
            ]
        else:
            writer = PromptWriter(self._vocabulary, self._seed + repeat)
            bodies = [writer.body(request, number) for number, request in enumerate(requests)]
        return bodies[: len(part.warm_up)], bodies[len(part.warm_up) :]


def turn(arms: Sequence[Arm], repeat: int) -> Iterator[Arm]:
    """The arms in the order of a repeat: each comes first in turn, and every other is reversed."""
    first = repeat // 2 % len(arms)
    order = [*arms[first:], *arms[:first]]
    yield from reversed(order) if repeat % 2 else order
