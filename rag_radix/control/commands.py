"""The commands that see and control a running server: `rag-radix stats`, `documents`, `top` …"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, cast

import orjson

from rag_radix.control.client import Client
from rag_radix.control.documents import DEFAULT_LIMIT, SORTS
from rag_radix.control.tables import bar, counted, printable, table
from rag_radix.control.top import watch
from rag_radix.control.warm_command import add_warm_options, show_progress, warm
from rag_radix.errors import ControlError, RagRadixError
from rag_radix.statistics import namespace_name

DEFAULT_URL = "http://localhost:30000"
_MOST_SECONDS = 10**9

_Command = Callable[[Client, argparse.Namespace], Any]
_Show = Callable[[Any], str]


def add_control_commands(commands: Any) -> None:
    """Add the commands to an argparse `add_subparsers()` object."""
    _add(commands, "stats", "say what a server has cached and done", _stats, show_stats)
    documents = _add(
        commands, "documents", "list the documents that a server has cached", _documents, show_rows
    )
    documents.add_argument(
        "--sort", choices=SORTS, default="frequency", help="default: %(default)s"
    )
    documents.add_argument("--order", choices=("asc", "desc"), help="default: largest first")
    documents.add_argument("--prefix", default="", help="only ids that begin with it")
    documents.add_argument("--limit", type=int, default=DEFAULT_LIMIT, metavar="N")
    documents.add_argument("--offset", type=int, default=0, metavar="N")
    _add_namespace(documents)
    invalidate = _add(
        commands,
        "invalidate",
        "let documents be found no more, since they have changed or must go",
        _invalidate,
        show_removed,
    )
    which = invalidate.add_mutually_exclusive_group(required=True)
    which.add_argument("id", nargs="?", help="the document's id")
    which.add_argument("--prefix", help="all whose ids begin with it")
    which.add_argument("--all", action="store_true", help="all, prompts without documents too")
    invalidate.add_argument("--version", help="only this revision of the document")
    _add_namespace(invalidate)
    pin = _add(commands, "pin", "keep a document that is cached, with its prefixes", _pin, show_pin)
    unpin = _add(commands, "unpin", "keep a document no longer", _unpin, show_unpin)
    for parser in (pin, unpin):
        parser.add_argument("id", help="the document's id")
        parser.add_argument("--version", help="only this revision of it")
        _add_namespace(parser)
    pin.add_argument("--tier", choices=("device", "host"), default="device", help="by %(default)s")
    pin.add_argument("--ttl", type=_seconds, metavar="S", help="for so many seconds (for good)")
    _add(commands, "pins", "list what is pinned", _pins, show_pins)
    add_warm_options(
        _add(commands, "warm", "compute documents before they are asked for", warm, _progress)
    )
    top = _command(commands, "top", "watch a server: its tiers, rates and documents", watch)
    top.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="by %(default)s")
    top.add_argument("--times", type=int, default=0, metavar="N", help="look so often (for good)")


def _add_namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace",
        help='only those of this namespace, as `rag-radix documents` names it ("": the public one)',
    )
    parser.add_argument("--cache-salt", metavar="SALT", help="only those of requests with it")
    parser.add_argument("--extra-key", metavar="KEY", help="only those of requests with it")


def _namespace(options: argparse.Namespace) -> str | None:
    """The name of the namespace that the options mean: no secret, so it may be sent and logged."""
    if options.cache_salt is None and options.extra_key is None:
        return cast(str | None, options.namespace)
    if options.namespace is not None:
        raise ControlError("give either --namespace, or --cache-salt and --extra-key")
    return namespace_name(options.extra_key, options.cache_salt)


def _add(
    commands: Any, name: str, what: str, command: _Command, show: _Show
) -> argparse.ArgumentParser:
    def ask(client: Client, options: argparse.Namespace) -> int:
        answer = command(client, options)
        if options.json:
            print(orjson.dumps(answer).decode())
            return 0
        ranks = answer.get("ranks", [answer])
        for number, rank in enumerate(ranks):
            if len(ranks) > 1:
                print(f"data-parallel rank {number}")
            print(show(rank))
        return 0

    parser = _command(commands, name, what, ask)
    parser.add_argument("--json", action="store_true", help="the server's answer as it is")
    return parser


def _command(
    commands: Any, name: str, what: str, act: Callable[[Client, argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what)
    parser.add_argument("--url", default=DEFAULT_URL, help="default: %(default)s")
    parser.add_argument(
        "--api-key", metavar="KEY", help="of the server: its admin key, where it has one"
    )

    def run(options: argparse.Namespace) -> int:
        try:
            return act(Client(options.url, options.api_key), options)
        except RagRadixError as error:
            print(f"rag-radix: {printable(str(error))}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130

    parser.set_defaults(run=run)
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} isn't a number of seconds above 0 and up to {_MOST_SECONDS:,}"
        )
    return seconds


def _stats(client: Client, _options: argparse.Namespace) -> Any:
    return client.get("/rag/stats")


def _documents(client: Client, options: argparse.Namespace) -> Any:
    query = {"sort": options.sort, "limit": options.limit, "offset": options.offset}
    if options.order is not None:
        query["order"] = options.order
    if options.prefix:
        query["prefix"] = options.prefix
    if (namespace := _namespace(options)) is not None:
        query["namespace"] = namespace
    return client.get("/rag/documents", **query)


def _invalidate(client: Client, options: argparse.Namespace) -> Any:
    return client.post("/rag/invalidate", selector_body(options))


def _pin(client: Client, options: argparse.Namespace) -> Any:
    body = {**selector_body(options), "tier": options.tier}
    if options.ttl is not None:
        body["ttl_s"] = options.ttl
    return client.post("/rag/pin", body)


def _unpin(client: Client, options: argparse.Namespace) -> Any:
    return client.post("/rag/unpin", selector_body(options))


def _progress(progress: dict[str, Any]) -> str:
    return printable(show_progress(progress))


def _pins(client: Client, _options: argparse.Namespace) -> Any:
    return client.get("/rag/pins")


def selector_body(options: argparse.Namespace) -> dict[str, Any]:
    """The body that says which documents the options mean."""
    given = {name: getattr(options, name, None) for name in ("id", "version", "prefix")}
    given["namespace"] = _namespace(options)
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if getattr(options, "all", False):
        body["all"] = True
    return body


def show_stats(report: dict[str, Any]) -> str:
    lines = [f"policy {report['policy']}, {counted(report['nodes'], 'node')}"]
    for name in ("device", "host"):
        if (tier := report[name]) is not None:
            used, capacity = tier["cached_tokens"], tier["capacity_tokens"]
            lines.append(
                f"{name:<7} {bar(used, capacity)} {used:,} of {capacity:,} tokens, "
                f"{counted(tier['documents'], 'document')}, "
                f"{counted(tier['evicted_nodes'], 'node')} evicted"
            )
    requests = report["requests"]
    prompt = max(requests["prompt_tokens"], 1)
    lines.append(
        f"found   {requests['device_hit_tokens'] / prompt:.1%} of {requests['prompt_tokens']:,} "
        f"prompt tokens on the device, {requests['host_hit_tokens'] / prompt:.1%} on host, in "
        f"{counted(requests['requests'], 'request')}"
    )
    swap = report["swap"]
    lines.append(
        f"copied  {swap['out_bytes'] / 2**20:,.0f} MiB to host, "
        f"{swap['in_bytes'] / 2**20:,.0f} MiB back"
    )
    if (storage := report.get("storage")) is not None:
        lines.append(
            f"storage {storage['bytes'] / 2**20:,.0f} MiB in {storage['files']:,} files, "
            f"{storage['written_pages']:,} pages written, {storage['read_pages']:,} read"
        )
        preloaded = storage["preloaded"]
        lines.append(f"preload {preloaded['tokens']:,} tokens to host, {preloaded['state']}")
    return "\n".join(lines)


def show_rows(page: dict[str, Any]) -> str:
    columns = {
        "id": "id",
        "version": "version",
        "namespace": "namespace",
        "tokens": "tokens",
        "device_tokens": "on device",
        "host_tokens": "on host",
        "frequency": "frequency",
        "device_hits": "device hits",
        "host_hits": "host hits",
        "positions": "places",
        "priority": "priority",
        "pinned": "pinned",
    }
    rows = [[row[name] for name in columns] for row in page["documents"]]
    first, last = page["offset"] + 1, page["offset"] + len(rows)
    shown = f"{first:,}–{last:,}" if rows else "none"
    return f"{table(list(columns.values()), rows)}\n{shown} of {counted(page['total'], 'document')}"


def show_pin(answer: dict[str, Any]) -> str:
    return f"pinned at {counted(answer['places'], 'place')}"


def show_unpin(answer: dict[str, Any]) -> str:
    return f"{counted(answer['pins'], 'pin')} given up"


def show_pins(answer: dict[str, Any]) -> str:
    lines = []
    for name, tier in answer["tiers"].items():
        used, budget = tier["pinned_tokens"], tier["budget_tokens"]
        lines.append(
            f"{name:<7} {bar(used, budget)} {used:,} of {budget:,} tokens that may be pinned, "
            f"{counted(tier['places'], 'place')}"
        )
    rows = [
        [
            pin["id"],
            pin.get("version", ""),
            pin.get("namespace", ""),
            pin["tier"],
            "" if pin["expires_in_s"] is None else f"{pin['expires_in_s']:,.0f} s",
        ]
        for pin in answer["pins"]
    ]
    lines.append(table(["id", "version", "namespace", "tier", "ends in"], rows))
    return "\n".join(lines)


def show_removed(removed: dict[str, Any]) -> str:
    freed, in_use = removed["freed"], removed["in_use"]
    text = (
        f"{counted(removed['places'], 'place')}: "
        f"{counted(freed['device_tokens'], 'token')} on the device and "
        f"{freed['host_tokens']:,} on host freed ({freed['bytes'] / 2**20:,.1f} MiB)"
    )
    if storage := removed.get("storage"):
        text += f", {counted(storage['files'], 'file')} of storage removed"
    if in_use["nodes"] or removed["requests"]:
        more = in_use["device_tokens"] + in_use["host_tokens"]
        text += (
            f"; {more:,} more once what uses them ends; "
            f"{counted(removed['requests'], 'request')} in progress"
        )
    return text
