"""What a running server says of itself."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rag_radix.comparison import STATE_KEY
from rag_radix.environment import COMPARISON
from rag_radix.errors import RagRadixError

REQUEST_LIMIT_S = 60.0


class WrongArmError(RagRadixError, RuntimeError):
    """A server isn't what its arm says, or can't say what it is."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server states.

    Attributes:
        model: Path or name it was started with.
        attention_backend: By which name it was chosen, for prefills.
        built: See `rag_radix.comparison.observed`; of its first rank.
    """

    model: str
    attention_backend: str
    built: Mapping[str, Any]


@dataclass(frozen=True)
class Counters:
    """What a server has counted since it started; None where it doesn't.

    Attributes:
        scheduling_parts_s: CPU time by part: `choosing` batches, `keeping` what prefills computed
            and what requests leave. What SGLang does there belongs to it: order, matching,
            eviction, insertion, slots; copies between the tiers don't.
        moved_bytes: Copied between the tiers, to host (`out`) and back (`in`); None without a host
            tier.
        tree: The knowledge tree's `/rag/stats`.
    """

    scheduling_parts_s: Mapping[str, float] | None
    moved_bytes: Mapping[str, int] | None
    tree: Mapping[str, Any] | None


def read_facts(url: str) -> ServerFacts:
    """Ask a server what it is.

    Raises:
        WrongArmError: It can't be asked, or doesn't say what cache it built.
    """
    info = get_json(f"{url}/server_info")
    backend = info["prefill_attention_backend"] or info["attention_backend"]
    return ServerFacts(info["model_path"], backend, _state(info, url)["built"])


def read_counters(url: str) -> Counters:
    """Ask a server what it has counted.

    Raises:
        WrongArmError: As of `read_facts`.
    """
    state = _state(get_json(f"{url}/server_info"), url)
    has_tree = state["built"]["cache"] == "KnowledgeTree"
    tree = read_tree_report(url) if has_tree else None
    return Counters(state["scheduling_parts_s"], state["moved_bytes"], tree)


def _state(info: Mapping[str, Any], url: str) -> dict[str, Any]:
    state: dict[str, Any] | None = info["internal_states"][0].get(STATE_KEY)
    if state is None:
        raise WrongArmError(
            f"{url} doesn't say which cache it built: start it with {COMPARISON.name}=1 in its "
            "environment, where rag-radix is installed"
        )
    return state


def read_tree_report(url: str) -> dict[str, Any]:
    """`GET /rag/stats` of a server with the knowledge tree.

    Raises:
        WrongArmError: It has none.
    """
    report: dict[str, Any] = get_json(f"{url}/rag/stats")
    return report


def get_json(url: str) -> Any:
    """GET a JSON value.

    Raises:
        WrongArmError: There is none.
    """
    try:
        with urllib.request.urlopen(url, timeout=REQUEST_LIMIT_S) as reply:
            return json.loads(reply.read())
    except (OSError, ValueError) as error:
        raise WrongArmError(f"{url} doesn't answer as such a server does: {error}") from error
