"""`rag-radix warm`: which documents a server computes before anybody asks for them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rag_radix.control.client import Client
from rag_radix.control.tables import counted
from rag_radix.control.warming import DEFAULT_TOKENS_PER_S
from rag_radix.errors import ControlError, RagRadixError
from rag_radix.statistics import namespace_name

# In a message, of a trace that may have very many.
_NAMESPACES_TOLD = 10


def add_warm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="?",
        type=Path,
        help="an index of `rag-radix index build`, or lines of {id, text, version}; without it, "
        "say how far warming has come",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ids", nargs="+", metavar="ID", help="these documents, in this order")
    which.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="those that would have saved the most prefill in a recorded trace, best first, of "
        "the requests with this --cache-salt and --extra-key; without them, of what is public",
    )
    which.add_argument("--stop", action="store_true", help="leave the documents that remain")
    parser.add_argument("--top", type=int, default=100, metavar="N", help="of --trace: so many")
    parser.add_argument(
        "--trace-namespace",
        metavar="NAME",
        help="of --trace: whose requests count, where it has names of its own for namespaces",
    )
    parser.add_argument(
        "--prefix", default="", help="what prompts begin with, up to the first document"
    )
    parser.add_argument("--prefix-file", type=Path, metavar="FILE", help="the same, in a file")
    parser.add_argument(
        "--template", help="how a document stands in a prompt (that of rag_retrieve)"
    )
    parser.add_argument("--cache-salt", metavar="SALT", help="of the requests to come")
    parser.add_argument("--extra-key", metavar="KEY", help="likewise")
    parser.add_argument(
        "--shared-prefix", action="store_true", help="the salt covers the documents alone"
    )
    parser.add_argument("--tokens-per-s", type=float, default=DEFAULT_TOKENS_PER_S, metavar="N")


def warm(client: Client, options: argparse.Namespace) -> Any:
    """Order the documents, stop, or ask how far it is.

    Raises:
        ControlError: A source can't be read, or the server refuses.
    """
    if options.stop:
        return client.delete("/rag/warm")
    if options.source is None:
        return client.get("/rag/warm")
    return client.post("/rag/warm", order(options))


def order(options: argparse.Namespace) -> dict[str, Any]:
    """The body that orders what the options mean."""
    from rag_radix_frontend.errors import FrontendError
    from rag_radix_frontend.template import DEFAULT_TEMPLATE, compile_template

    try:
        render = compile_template(options.template or DEFAULT_TEMPLATE)
        prefix = options.prefix
        if options.prefix_file is not None:
            prefix = options.prefix_file.read_text()
        documents = [
            {"id": document.id, "version": document.version, "text": render(document)}
            for document in _chosen(options)
        ]
    except (FrontendError, OSError, UnicodeDecodeError) as error:
        raise ControlError(str(error)) from None
    tenant = {
        "cache_salt": options.cache_salt,
        "extra_key": options.extra_key,
        "salt_from": 0 if options.shared_prefix else None,
    }
    return {
        "prefix": prefix,
        "documents": documents,
        "tokens_per_s": options.tokens_per_s,
        **{name: value for name, value in tenant.items() if value is not None},
    }


def _chosen(options: argparse.Namespace) -> Iterator[Any]:
    from rag_radix_frontend.document import parse_document
    from rag_radix_frontend.store import DocumentStore

    with ExitStack() as stack:
        if options.source.is_dir():
            store: Any = stack.enter_context(DocumentStore(options.source))
            by_id = store.by_id
        else:
            lines = options.source.read_bytes().splitlines()
            store = [parse_document(line) for line in lines if line.strip()]
            by_id = {document.id: document for document in store}.__getitem__
        if options.trace is not None:
            namespace = options.trace_namespace
            if namespace is None:
                namespace = namespace_name(options.extra_key, options.cache_salt)
            ids: Any = paying_most(options.trace, options.top, namespace)
        else:
            ids = options.ids
        if ids is None:
            yield from store
            return
        for each in ids:
            try:
                yield by_id(each)
            except KeyError:
                raise ControlError(f"{options.source} has no document {each!r}") from None


def paying_most(trace: Path, count: int, namespace: str) -> list[str]:
    """The `count` documents of a trace with the most tokens retrieved in a namespace, all
    retrievals added up.

    Raises:
        ControlError: The trace can't be read, or has no documents there.
    """
    from rag_radix.replay.trace import read_trace

    tokens: Counter[str] = Counter()
    others: set[str] = set()
    try:
        for request in read_trace(trace):
            for document in request.documents:
                where = request.namespace_at(document.start)
                if where == namespace:
                    tokens[document.id] += document.end - document.start
                else:
                    others.add(where)
    except RagRadixError as error:
        raise ControlError(str(error)) from None
    if not tokens:
        known = ", ".join(map(repr, sorted(others)[:_NAMESPACES_TOLD])) or "none"
        raise ControlError(
            f"{trace} has no documents in the namespace {namespace!r}, only in: {known}. Give the "
            "--cache-salt and --extra-key of its requests, or --trace-namespace"
        )
    return sorted(tokens, key=lambda each: (-tokens[each], each))[:count]


def show_progress(progress: dict[str, Any]) -> str:
    documents = counted(progress["documents"], "document")
    text = f"{progress['state']}: {progress['warmed']:,} of {documents}"
    if progress["refusals"]:
        text += f", {counted(progress['refusals'], 'time')} gave way to requests"
    if progress["failed"]:
        text += f", {progress['failed']:,} failed, the last one {progress['problem']}"
    return text
