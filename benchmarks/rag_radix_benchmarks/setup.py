"""What all arms of a comparison have in common, and the command line of each."""

from __future__ import annotations

from dataclasses import dataclass

from rag_radix_benchmarks.arms import Arm


@dataclass(frozen=True)
class Setup:
    """The server that every arm is a variant of.

    Attributes:
        model_path: Path or name.
        attention_backend: As for `--attention-backend`; the same in every arm, so that what it
            gains enters no ratio of caches.
        device_tokens: Size of the device tier.
        host_tokens: Size of the host tier, for arms that have one.
        page_size: Tokens that are cached together.
        chunk_tokens: As for `--chunked-prefill-size`.
        running_requests: Requests that run at once.
        more_flags: Of `sglang serve`.
    """

    model_path: str
    attention_backend: str
    device_tokens: int
    host_tokens: int
    page_size: int
    chunk_tokens: int
    running_requests: int
    more_flags: tuple[str, ...] = ()

    def flags(self, arm: Arm) -> list[str]:
        """The flags that serve an arm, without model and address."""
        flags = [
            *("--attention-backend", self.attention_backend),
            *("--max-total-tokens", str(self.device_tokens)),
            *("--page-size", str(self.page_size)),
            *("--chunked-prefill-size", str(self.chunk_tokens)),
            *("--max-running-requests", str(self.running_requests)),
            *("--log-level", "warning"),
        ]
        if arm.host_tier:
            ratio = self.host_tokens / self.device_tokens
            flags += ["--enable-hierarchical-cache", "--hicache-ratio", repr(ratio)]
        return [*flags, *arm.flags, *self.more_flags]
