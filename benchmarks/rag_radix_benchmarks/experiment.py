"""Measures trials: empties and warms a server's cache, asks, and keeps what came of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from rag_radix_benchmarks.arms import Arm
from rag_radix_benchmarks.facts import read_tree_report
from rag_radix_benchmarks.load import Run, closed_loop, open_loop
from rag_radix_benchmarks.progress import progress
from rag_radix_benchmarks.prompts import PromptWriter
from rag_radix_benchmarks.servers import ArmServer, Servers
from rag_radix_benchmarks.setup import Setup
from rag_radix_benchmarks.trials import ClosedLoop, Load, OpenLoop, Trial, TrialResult, TrialStore
from rag_radix_benchmarks.workload import Part, Workload


class Experiment:
    """Arms of one setup under one workload.

    Args:
        setup: What all arms have in common.
        workload: What they are asked.
        servers: Where.
        store: What was measured before isn't measured again.
        seed: Of the texts.
    """

    def __init__(
        self, setup: Setup, workload: Workload, servers: Servers, store: TrialStore, seed: int
    ) -> None:
        self._setup = setup
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
        progress(f"{trial}: mean TTFT {mean_s:.3f} s, hit rate {result.run.token_hit_rate:.1%}")
        return result

    def capacity(self, arm: Arm) -> float:
        """Requests a second that an arm takes when its queue is never empty."""
        load = ClosedLoop(2 * self._setup.running_requests)
        run = self.run(self.trial(arm, load, repeat=0)).run
        return len(run.outcomes) / run.seconds

    def _measure(self, trial: Trial, server: ArmServer) -> TrialResult:
        part, control = self._part(trial.repeat), server.control
        self._vocabulary = self._vocabulary or control.vocabulary()
        warm_up, measured = self._bodies(trial.repeat)
        concurrency = self._setup.running_requests
        if server.url not in self._used:
            closed_loop(server.url, measured[:2], concurrency=1)  # what is slow on its first use
            self._used.add(server.url)
        control.wait_until_idle()
        control.flush()
        if warm_up:
            closed_loop(server.url, warm_up, concurrency)
            control.wait_until_idle()
        before = self._tree(trial, server)
        run = _drive(server.url, measured, part, trial.load)
        after = self._tree(trial, server)
        moved = None
        if before is not None and after is not None:
            moved = {
                way: after["swap"][f"{way}_bytes"] - before["swap"][f"{way}_bytes"]
                for way in ("out", "in")
            }
        return TrialResult(run, server.facts, moved, after)

    def _tree(self, trial: Trial, server: ArmServer) -> dict[str, Any] | None:
        """The knowledge tree's report, of an arm that has one."""
        if trial.arm.built["cache"] != "KnowledgeTree":
            return None
        return read_tree_report(server.url)

    def _write(self, repeat: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        part = self._part(repeat)
        writer = PromptWriter(self._vocabulary, self._seed + repeat)
        bodies = [
            writer.body(request, number)
            for number, request in enumerate(part.warm_up + part.measured)
        ]
        return bodies[: len(part.warm_up)], bodies[len(part.warm_up) :]


def _drive(url: str, bodies: Sequence[dict[str, Any]], part: Part, load: Load) -> Run:
    if isinstance(load, OpenLoop):
        return open_loop(url, bodies, part.due_s(load.requests_per_s))
    return closed_loop(url, bodies, load.concurrency)
