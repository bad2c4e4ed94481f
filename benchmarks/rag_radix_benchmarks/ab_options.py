"""The options of `rag-radix bench ab`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rag_radix.errors import ConfigError
from rag_radix.replay.workloads import WORKLOADS
from rag_radix_benchmarks.arms import KNOWLEDGE_TREE, STOCK_ARMS, Arm, ProgramStyle, parse_arms
from rag_radix_benchmarks.setup import Setup
from rag_radix_benchmarks.workload import Recorded, Synthetic, Workload

_Number = TypeVar("_Number", int, float)

# Defaults of a comparison that is meant, and of a first impression: 12 minutes on 2 cores with a
# model of 135M parameters.
FULL = {"loads": "0.5,0.8,0.95", "repeats": 5, "warm_up": 150, "requests": 100}
QUICK = {"loads": "0.8", "repeats": 4, "warm_up": 50, "requests": 28}
# Popularity that moves does so this often in a run: a test of it, and still time to follow.
MOVES = 8
# Of what a server holds, SGLang leaves some free of a request.
SPARE_TOKENS = 6
AT_LEAST_ONE = (
    *("repeats", "requests", "output_tokens"),
    *("device_tokens", "host_tokens", "page_size", "chunk_tokens", "running_requests"),
    *("most_prompt_tokens", "drift_every", "burst_window"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model-path", required=True, metavar="MODEL")
    parser.add_argument(
        "--arms",
        default=f"stock-lru,stock-hicache,{KNOWLEDGE_TREE}",
        help=f"some of {', '.join(STOCK_ARMS)}, {KNOWLEDGE_TREE}; the latter with settings like "
        f"{KNOWLEDGE_TREE}:policy=pgdsf-plus:reorder_window=0; @URL behind one takes a server "
        "that is running, LABEL= before one names it",
    )
    parser.add_argument(
        "--reference",
        metavar="ARM",
        default=argparse.SUPPRESS,
        help=f"that the others are divided by (default: the last {KNOWLEDGE_TREE})",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--workload", choices=WORKLOADS, default="mmlu-like")
    source.add_argument("--trace", type=Path, metavar="FILE", help="a trace of JSON lines")
    source.add_argument(
        "--corpus",
        type=Path,
        metavar="INDEX",
        help="of rag-radix index build, or python-reference for Python's, built on first use: "
        "questions over real documents through its retriever",
    )
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help="for --corpus, one a line (default: the first line of each document)",
    )
    parser.add_argument(
        "--skew", type=float, default=1.0, help="exponent of the questions' popularity, --corpus"
    )
    parser.add_argument(
        "--programs",
        action="store_true",
        help="--corpus is asked by rag_retrieve() programs instead of prompts; arms may end in "
        "+speculation, +canonical or +cached_first",
    )
    parser.add_argument(
        "--search-ms",
        type=float,
        default=0.0,
        help="programs wait so long for a search done before, as in a database elsewhere "
        "(default: they search)",
    )
    parser.add_argument("--documents", type=int, default=300, help="in the corpus, workloads")
    parser.add_argument("--document-tokens", type=int, default=200, help="mean, workloads")
    parser.add_argument("--k", type=int, default=2, help="documents a request")
    parser.add_argument("--output-tokens", type=int, default=4, help="of a request")
    parser.add_argument(
        "--most-prompt-tokens",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="documents are cut so that no prompt is longer, workloads (default: what the device "
        "tier and the context of a model in a local folder hold)",
    )
    parser.add_argument(
        "--drift-every",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help=f"requests between shifts of popularity, drift (default: run / {MOVES})",
    )
    parser.add_argument(
        "--burst-window",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help=f"requests that a burst reaches back, burst (default: run / {MOVES})",
    )
    _add_sized(parser, "--requests", int, "measured in a run")
    _add_sized(parser, "--warm-up", int, "requests of a run that fill its cache before")
    _add_sized(parser, "--repeats", int, "of each arm at each load")
    parser.add_argument(
        "--precision",
        type=float,
        metavar="P",
        help="repeat until the intervals of all ratios of mean TTFT end within this part of the "
        "ratio, like 0.05",
    )
    parser.add_argument(
        "--most-repeats", type=int, default=20, metavar="N", help="however wide they are"
    )
    load = parser.add_mutually_exclusive_group()
    _add_sized(load, "--loads", str, "arrivals by the capacity of each of --capacity-of")
    load.add_argument("--rates", metavar="R,R", help="arrivals a second")
    load.add_argument("--concurrency", metavar="N,N", help="closed loops instead of arrivals")
    parser.add_argument(
        "--capacity-of",
        metavar="ARM,ARM",
        default=argparse.SUPPRESS,
        help="whose capacities --loads are of (default: the first arm)",
    )
    parser.add_argument(
        "--throughput",
        action="store_true",
        help="search the highest rate whose mean TTFT stays under 5 times that of the lowest one",
    )
    # 5% and 30% of the documents' tokens.
    parser.add_argument("--device-tokens", type=int, default=3_000, help="of the device tier")
    parser.add_argument("--host-tokens", type=int, default=18_000, help="of the host tier")
    parser.add_argument("--running-requests", type=int, default=2, help="that run at once")
    parser.add_argument("--chunk-tokens", type=int, default=2_048, help="of a prefill at once")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument(
        "--attention-backend",
        default=argparse.SUPPRESS,
        help="of all arms (default: rag_prefix, on CUDA flashinfer)",
    )
    parser.add_argument(
        "--cost-table",
        type=Path,
        metavar="FILE",
        help="of rag-radix profile, to weigh tokens for the bound; without it, the model's shape",
    )
    parser.add_argument(
        "--servers",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="that run side by side (default: as memory allows, on CUDA 1)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="a first impression: 12 minutes on 2 cores"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep finished runs, and go on")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write Markdown and charts")
    parser.add_argument("--json", action="store_true", help="end with one object on the last line")
    parser.add_argument("server_flags", nargs="*", metavar="-- SERVER FLAGS")


def _add_sized(
    parser: argparse._ActionsContainer, flag: str, kind: Callable[[str], object], meaning: str
) -> None:
    """An option whose default depends on --quick."""
    name = flag.removeprefix("--").replace("-", "_")
    meaning += f" (default: {FULL[name]}, quick: {QUICK[name]})"
    parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=meaning)


@dataclass(frozen=True)
class Plan:
    """What the options ask for.

    Attributes:
        arms: In the order given.
        reference: The arm that the others are divided by.
        repeats: At least.
        most_repeats: At most, where `precision` asks for more.
        precision: Repeats go on until every ratio's interval ends within this part of it.
        capacity_of: Arms whose capacities `shares` are of.
        shares: Loads by capacity.
        rates: Loads in requests a second.
        concurrencies: Closed loops.
    """

    setup: Setup
    arms: tuple[Arm, ...]
    reference: Arm
    workload: Workload
    repeats: int
    most_repeats: int
    precision: float | None
    capacity_of: tuple[Arm, ...]
    shares: tuple[float, ...]
    rates: tuple[float, ...]
    concurrencies: tuple[int, ...]
    servers: int | None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Plan:
        """Check the options and fill in the defaults that depend on others.

        Raises:
            ConfigError: One is wrong.
            TraceError: The trace can't be read.
        """
        given = {**FULL, **(QUICK if options.quick else {}), **vars(options)}
        if given["rates"] or given["concurrency"]:
            given["loads"] = ""
        arms = parse_arms(options.arms)
        for name in AT_LEAST_ONE:
            if given.get(name, 1) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {given[name]}: give at least 1")
        if options.programs and options.corpus is None:
            raise ConfigError("--programs ask a --corpus, which isn't given")
        if options.programs and any(arm.is_peer for arm in arms):
            raise ConfigError("--programs ask servers of SGLang, so there can't be a peer")
        for arm in arms:
            if arm.programs != ProgramStyle() and not options.programs:
                raise ConfigError(f"--arms {arm.name!r} says how programs retrieve: add --programs")
        most_repeats = given["repeats"]
        if options.precision is not None:
            most_repeats = max(options.most_repeats, given["repeats"])
        shares = _numbers("--loads", given["loads"], float)
        rates = _numbers("--rates", given["rates"] or "", float)
        concurrencies = _numbers("--concurrency", given["concurrency"] or "", int)
        if not (shares or rates or concurrencies):
            raise ConfigError(f"--loads {given['loads']!r}: give one at least")
        cuda = _has_cuda()
        setup = Setup(
            model_path=options.model_path,
            attention_backend=given.get("attention_backend")
            or ("flashinfer" if cuda else "rag_prefix"),
            device_tokens=options.device_tokens,
            host_tokens=options.host_tokens,
            page_size=options.page_size,
            chunk_tokens=options.chunk_tokens,
            running_requests=options.running_requests,
            more_flags=tuple(options.server_flags),
        )
        return cls(
            setup=setup,
            arms=tuple(arms),
            reference=_arm(arms, "--reference", given.get("reference", _last_tree(arms))),
            workload=_workload(options, setup, given["warm_up"], given["requests"], most_repeats),
            repeats=given["repeats"],
            most_repeats=most_repeats,
            precision=options.precision,
            capacity_of=tuple(
                _arm(arms, "--capacity-of", name.strip())
                for name in given.get("capacity_of", arms[0].name).split(",")
            ),
            shares=shares,
            rates=rates,
            concurrencies=concurrencies,
            servers=given.get("servers", 1 if cuda else None),
        )


def _workload(
    options: argparse.Namespace, setup: Setup, warm_up: int, requests: int, repeats: int
) -> Workload:
    if options.trace is not None:
        return Recorded.open(options.trace, warm_up, requests, repeats, options.seed)
    if options.corpus is not None:
        # The retriever brings Faiss along.
        from rag_radix_benchmarks.corpus import CorpusPrograms, CorpusQuestions
        from rag_radix_benchmarks.reference_corpus import REFERENCE, reference_index

        index = reference_index() if str(options.corpus) == REFERENCE else options.corpus
        kind: type[CorpusQuestions] = CorpusQuestions
        more: dict[str, Any] = {}
        if options.programs:
            kind, more = CorpusPrograms, {"search_s": options.search_ms / 1e3}
        return kind.open(
            index,
            options.questions,
            **more,
            model_path=options.model_path,
            k=options.k,
            skew=options.skew,
            output_tokens=options.output_tokens,
            warm_up=warm_up,
            requests=requests,
            seed=options.seed,
        )
    moves = max((warm_up + requests) // MOVES, 1)
    return Synthetic(
        name=options.workload,
        documents=options.documents,
        document_tokens=options.document_tokens,
        k=options.k,
        output_tokens=options.output_tokens,
        warm_up=warm_up,
        requests=requests,
        seed=options.seed,
        drift_every=getattr(options, "drift_every", moves),
        burst_window=getattr(options, "burst_window", moves),
        most_prompt_tokens=getattr(
            options, "most_prompt_tokens", _held_tokens(setup) - options.output_tokens
        ),
    )


def _held_tokens(setup: Setup) -> int:
    """Most tokens of a request, output included, as far as the options tell."""
    held = setup.device_tokens // setup.page_size * setup.page_size
    config = Path(setup.model_path) / "config.json"
    if config.exists():
        held = min(held, json.loads(config.read_text()).get("max_position_embeddings", held))
    return held - SPARE_TOKENS


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _last_tree(arms: list[Arm]) -> str:
    trees = [arm.name for arm in arms if arm.built.get("cache") == "KnowledgeTree"]
    return trees[-1] if trees else arms[-1].name


def _arm(arms: list[Arm], flag: str, name: str) -> Arm:
    for arm in arms:
        if arm.name == name:
            return arm
    raise ConfigError(f"{flag} {name!r} is none of --arms: {', '.join(arm.name for arm in arms)}")


def _numbers(flag: str, text: str, kind: Callable[[str], _Number]) -> tuple[_Number, ...]:
    try:
        values = tuple(kind(each) for each in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: give numbers, separated by commas") from None
    if any(value <= 0 for value in values):
        raise ConfigError(f"{flag} {text!r}: give positive numbers")
    return values
