"""The requests of a comparison: for each repeat its own, the same for every arm."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rag_radix.errors import ConfigError
from rag_radix.replay.trace import TraceRequest, read_trace
from rag_radix.replay.workloads import generate


@dataclass(frozen=True)
class Part:
    """What one run serves.

    Attributes:
        warm_up: Fills the caches; not measured.
        measured: Comes right after it in the trace.
        prompts: Token ids of both, one after the other; None where a trace knows no texts, and
            any will do.
        questions: Of programs, which find their documents themselves: number and text of each,
            in the same order; None where prompts are sent.
    """

    warm_up: tuple[TraceRequest, ...]
    measured: tuple[TraceRequest, ...]
    prompts: tuple[tuple[int, ...], ...] | None = None
    questions: tuple[tuple[int, str], ...] | None = None

    def due_s(self, requests_per_s: float) -> list[float]:
        """When the measured requests are due: as in the trace, at another mean rate.

        The first is due at once; gaps keep their proportions, so that the arrivals of a
        Poisson process remain that.
        """
        first, last = self.measured[0].arrival_s, self.measured[-1].arrival_s
        mean_gap = (last - first) / max(len(self.measured) - 1, 1)
        scale = 1 / (requests_per_s * mean_gap) if mean_gap else 0.0
        return [(request.arrival_s - first) * scale for request in self.measured]


@dataclass(frozen=True)
class Synthetic:
    """A workload of `rag_radix.replay.workloads`, sized to the machine; arrivals are Poisson.

    Each repeat is a trace of its own seed: the interval of a ratio covers the draw of corpus and
    requests as well as the noise of the machine. Attributes that aren't named here are arguments
    of `generate`.

    Attributes:
        warm_up: Requests of a repeat that aren't measured.
        requests: Requests of a repeat that are.
    """

    name: str
    documents: int
    document_tokens: int
    k: int
    output_tokens: int
    warm_up: int
    requests: int
    seed: int
    drift_every: int
    burst_window: int
    most_prompt_tokens: int

    def part(self, repeat: int) -> Part:
        trace = generate(
            self.name,
            requests=self.warm_up + self.requests,
            seed=self.seed + repeat,
            k=self.k,
            documents=self.documents,
            mean_document_tokens=self.document_tokens,
            output_tokens=self.output_tokens,
            drift_every=self.drift_every,
            burst_window=self.burst_window,
            most_prompt_tokens=self.most_prompt_tokens,
        )
        return Part(tuple(trace[: self.warm_up]), tuple(trace[self.warm_up :]))


@dataclass(frozen=True)
class Recorded:
    """A trace file, of which each repeat takes the next requests; arrivals are the trace's.

    Attributes:
        path: The file.
        digest: Of its content.
        warm_up: Requests of a repeat that aren't measured.
        requests: Requests of a repeat that are.
        seed: Of the texts.
    """

    path: str
    digest: str
    warm_up: int
    requests: int
    seed: int

    @classmethod
    def open(cls, path: Path, warm_up: int, requests: int, repeats: int, seed: int) -> Recorded:
        """Check that the file has enough requests.

        Raises:
            TraceError: It isn't a trace.
            ConfigError: It is too short.
        """
        available, needed = len(read_trace(path)), repeats * (warm_up + requests)
        if available < needed:
            raise ConfigError(
                f"trace {str(path)!r} has {available} requests, {repeats} repeats of "
                f"{warm_up} + {requests} need {needed}: lower --repeats, --warm-up or --requests"
            )
        digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        return cls(str(path), digest, warm_up, requests, seed)

    def part(self, repeat: int) -> Part:
        length = self.warm_up + self.requests
        trace = read_trace(self.path)[repeat * length : (repeat + 1) * length]
        return Part(tuple(trace[: self.warm_up]), tuple(trace[self.warm_up :]))


class Workload(Protocol):
    """A dataclass of plain values that decide what each repeat serves."""

    def part(self, repeat: int) -> Part:
        """What a repeat serves; the same every time."""
        ...
