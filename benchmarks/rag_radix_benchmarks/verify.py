"""Is a server what its arm says? Nothing is reported of one that isn't."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rag_radix_benchmarks.arms import Arm
from rag_radix_benchmarks.facts import ServerFacts, WrongArmError
from rag_radix_benchmarks.setup import Setup

# Keys of what a server says it built, the same for all arms whatever they are.
ALIKE = ("attention", "dtype", "kv_dtype", "tp_size")
# Other names of --dtype.
DTYPES = {"float": "float32", "half": "float16"}


def verify(arm: Arm, setup: Setup, facts: ServerFacts) -> None:
    """Compare a server with what its arm and the common setup say.

    Raises:
        WrongArmError: Naming all that is different.
    """
    if arm.is_peer:
        _verify_peer(arm, setup, facts)
        return
    expected: dict[str, object] = {
        **arm.built,
        "model": _comparable(setup.model_path),
        "attention_backend": setup.attention_backend,
        "device_tokens": setup.device_tokens // setup.page_size * setup.page_size,
        "page_size": setup.page_size,
        "chunk_tokens": setup.chunk_tokens,
        "running_requests": setup.running_requests,
    }
    actual = {
        **facts.built,
        "model": _comparable(facts.model),
        "attention_backend": facts.attention_backend,
    }
    if (dtype := _asked_dtype(setup.more_flags)) is not None:
        expected["dtype"] = dtype
    wrong = [
        f"{key} is {actual.get(key)!r}, not {value!r}"
        for key, value in expected.items()
        if actual.get(key) != value
    ]
    host_tokens = setup.host_tokens if arm.host_tier else 0
    # SGLang fills a host pool up to whole pages and adds one; the flag is a ratio.
    least, most = max(host_tokens - setup.page_size, 0), host_tokens + 2 * setup.page_size
    if not least <= actual["host_tokens"] <= (most if arm.host_tier else 0):
        wrong.append(f"host_tokens is {actual['host_tokens']!r}, not {host_tokens!r}")
    if wrong:
        raise WrongArmError(f"the server of {arm.name} isn't that arm: {'; '.join(wrong)}")


def verify_alike(arm: Arm, facts: ServerFacts, other: Arm, theirs: ServerFacts) -> None:
    """Compare what the servers of two arms compute with; peers state none of it.

    Raises:
        WrongArmError: Naming all that is different.
    """
    if arm.is_peer or other.is_peer:
        return
    wrong = [
        f"{key} is {facts.built.get(key)!r}, not {theirs.built.get(key)!r}"
        for key in ALIKE
        if facts.built.get(key) != theirs.built.get(key)
    ]
    if wrong:
        raise WrongArmError(f"{arm.name} isn't served as {other.name} is: {'; '.join(wrong)}")


def _asked_dtype(flags: Sequence[str]) -> str | None:
    """By PyTorch's name; None where the model's own is left to SGLang."""
    given = [value for flag, value in pairwise(flags) if flag == "--dtype"]
    name = given[-1] if given else "auto"
    return None if name == "auto" else f"torch.{DTYPES.get(name, name)}"


def _verify_peer(arm: Arm, setup: Setup, facts: ServerFacts) -> None:
    """A peer states nothing but its model, and that by a name of its own."""
    name = Path(setup.model_path).name
    if Path(facts.model).name != name:
        raise WrongArmError(f"the server of {arm.name} has the model {facts.model!r}, not {name!r}")


def _comparable(model: str) -> str:
    """A model by name or by folder; a folder in any spelling."""
    folder = Path(model)
    return str(folder.resolve()) if folder.is_dir() else model
