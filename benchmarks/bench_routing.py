#!/usr/bin/env python3
"""What SGLang's router leaves of the hit rate when it spreads requests over two servers.

Two servers behind the router, which keeps requests with the same leading document together by their
routing key, beside one server with the memory of both; also by the router's own `cache_aware`
policy and in turn (`round_robin`). All are asked the same completions from empty caches; of other
requests the router drops the annotation. It is the package `sglang-router`, in an environment of
its own or this one.

    python benchmarks/bench_routing.py --model-path MODEL --router PYTHON [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from string import ascii_letters

import psutil
from document_load import Body, Corpus, Load, hit_rate, read_completion
from rag_radix_frontend import ROUTING_HEADER, Document, routing_key

from rag_radix.launch import HOST, serving

TARGET = 0.9
# Arms of the router: its flags, and whether requests carry the key of their leading documents.
ROUTERS = {
    "by-document": (["--policy", "manual", "--assignment-mode", "min_group"], True),
    "cache-aware": (["--policy", "cache_aware"], False),
    "round-robin": (["--policy", "round_robin"], False),
}
_WORKERS = 2
_START_LIMIT_S = 60.0


def main() -> None:
    """Measure, and print a table or, with `--json`, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--router", default=sys.executable, help="a Python that has sglang-router")
    parser.add_argument("--arms", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--leading", type=int, default=1, help="documents that make the key")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--document-tokens", type=int, default=256)
    parser.add_argument("--device-tokens", type=int, default=8192, help="of each of the two")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=400, help="requests that aren't counted")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("flags", nargs="*", help="more flags for all servers, behind --")
    options = parser.parse_args()
    rates = {"one server": _one(options), **_two(options)}
    kept = {arm: rate / rates["one server"] for arm, rate in rates.items()}
    print(f"{'':14} hit rate  of one server's")
    for arm, rate in rates.items():
        print(f"{arm:14} {rate:8.1%} {kept[arm]:14.2f}")
    if options.json:
        result = {
            "target": TARGET,
            "hit_rates": rates,
            "of_one_server": kept,
            "settings": vars(options),
            "python": platform.python_version(),
            "sglang": version("sglang"),
            "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        }
        print(json.dumps(result))


def _one(options: argparse.Namespace) -> float:
    with _server(options, _WORKERS * options.device_tokens) as url:
        return _measure(url, [url], options, lambda body: {})


def _two(options: argparse.Namespace) -> dict[str, float]:
    rates = {}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_server(options, options.device_tokens)) for _ in range(_WORKERS)
        ]
        for arm in options.arms:
            flags, has_keys = ROUTERS[arm]

            def key(body: Body, leading: int = options.leading) -> Mapping[str, str]:
                found = body["custom_params"]["rag"]["documents"][:leading]
                documents = [Document(each["id"], "") for each in found]
                return {ROUTING_HEADER: routing_key(documents)}

            with _router(options.router, workers, flags) as url:
                headers = key if has_keys else lambda body: {}
                rates[arm] = _measure(url, workers, options, headers)
    return rates


def _measure(
    url: str,
    workers: list[str],
    options: argparse.Namespace,
    headers: Callable[[Body], Mapping[str, str]],
) -> float:
    for worker in workers:
        urllib.request.urlopen(urllib.request.Request(f"{worker}/flush_cache", b"")).close()
    count = options.warm_up + options.requests
    corpus = Corpus(options.documents, options.document_tokens)
    load = Load(
        url,
        islice(_completions(corpus), count),
        options.clients,
        route="/v1/completions",
        read=read_completion,
        headers=headers,
    )
    try:
        return hit_rate(load.wait_for(count)[options.warm_up :])
    finally:
        load.end()


def _completions(corpus: Corpus) -> Iterator[Body]:
    for number, request in enumerate(corpus.requests(seed=1)):
        text, spans = "Answer from the documents.\n", []
        for document in request.documents:
            end = len(text) + len(words := _words(document.id, document.end - document.start))
            spans.append({"id": document.id, "start": len(text), "end": end})
            text += words
        yield {
            "model": "default",
            "prompt": f"{text}Question {number}?",
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "custom_params": {"rag": {"documents": spans, "unit": "char"}},
        }


@cache
def _words(name: str, count: int) -> str:
    """A text of about so many tokens, always the same of a name: letters are a token each."""
    return " ".join(random.Random(name).choices(ascii_letters, k=count)) + "\n"


@contextmanager
def _server(options: argparse.Namespace, device_tokens: int) -> Iterator[str]:
    # Without a host tier, of which SGLang wants 10 GiB free for each server.
    flags = ["--radix-cache-backend", "knowledge-tree"]
    flags += ["--max-total-tokens", str(device_tokens), "--enable-cache-report", *options.flags]
    with serving(options.model_path, flags, program="sglang") as url:
        yield url


@contextmanager
def _router(python: str, workers: list[str], flags: list[str]) -> Iterator[str]:
    port, metrics_port = _free_port(), _free_port()
    command = [python, "-m", "sglang_router.launch_router", "--host", HOST, "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--log-level", "warn"]
    command += ["--worker-startup-check-interval", "1", *flags, "--worker-urls", *workers]
    process = subprocess.Popen(command, cwd=Path(python).parent)
    try:
        _wait_until_ready(process, f"http://{HOST}:{port}")
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        # It calls itself ready with the first of them already.
        with suppress(OSError), urllib.request.urlopen(f"{url}/workers", timeout=5) as reply:
            if json.load(reply)["stats"]["regular_count"] == _WORKERS:
                return
        time.sleep(0.2)
    raise SystemExit("the router wasn't ready; is sglang-router in the environment of --router?")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
