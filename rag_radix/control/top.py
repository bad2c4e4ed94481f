"""`rag-radix top`: a running server, looked at again and again."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import Any

from rag_radix.control.client import Client
from rag_radix.control.tables import bar, counted, printable, table

_CLEAR = "\x1b[H\x1b[2J"
_COLUMNS = {
    "id": "id",
    "version": "version",
    "tokens": "tokens",
    "device_tokens": "on device",
    "host_tokens": "on host",
    "frequency": "frequency",
    "device_hits": "device hits",
    "host_hits": "host hits",
    "positions": "places",
}
_OTHER_LINES = 14
# A scheduler looks through all documents for them, in pieces, and computes nothing meanwhile.
_PAUSE_FACTOR = 20


def watch(client: Client, options: argparse.Namespace) -> int:
    """Show the server every `options.interval` seconds, `options.times` times or for good.

    Raises:
        ControlError: It doesn't answer.
    """
    before: dict[str, Any] | None = None
    shown, on_terminal = 0, sys.stdout.isatty()
    hottest: list[dict[str, Any]] = []
    coldest: list[dict[str, Any]] = []
    due_s = time.monotonic()
    while True:
        report = client.get("/rag/stats")
        report = {**report["ranks"][0], "data-parallel": True} if "ranks" in report else report
        rows = max((shutil.get_terminal_size().lines - _OTHER_LINES) // 2, 3)
        if (started_s := time.monotonic()) >= due_s:
            hottest, coldest = (_documents(client, order, rows) for order in ("desc", "asc"))
            due_s = started_s + _PAUSE_FACTOR * (time.monotonic() - started_s)
        text = screen(report, before, options.interval, hottest, coldest)
        print(f"{_CLEAR if on_terminal else ''}{printable(client.url)}  {text}", flush=True)
        before, shown = report, shown + 1
        if shown == options.times:
            return 0
        time.sleep(options.interval)


def _documents(client: Client, order: str, rows: int) -> list[dict[str, Any]]:
    page = client.get("/rag/documents", sort="priority", order=order, limit=rows)
    documents: list[dict[str, Any]] = page.get("ranks", [page])[0]["documents"]
    return documents


def screen(
    report: dict[str, Any],
    before: dict[str, Any] | None,
    interval_s: float,
    hottest: list[dict[str, Any]],
    coldest: list[dict[str, Any]],
) -> str:
    """What is shown of one look; rates are those since the look `before`."""
    lines = [f"policy {report['policy']}, {counted(report['nodes'], 'node')}"]
    if "data-parallel" in report:
        lines[0] += ", data-parallel rank 0"
    for name in ("device", "host"):
        if (tier := report[name]) is not None:
            pinned = report["control"]["pins"][name]["pinned_tokens"]
            lines.append(
                f"{name:<7} {bar(tier['cached_tokens'], tier['capacity_tokens'])} "
                f"{tier['cached_tokens']:>11,} of {tier['capacity_tokens']:,} tokens, "
                f"{counted(tier['documents'], 'document')}, {counted(pinned, 'token')} pinned"
            )
    now, past = report["requests"], (before or report)["requests"]
    grown = {name: now[name] - past[name] for name in now}
    prompt = grown["prompt_tokens"]
    found = [
        f"{grown[f'{tier}_hit_tokens'] / prompt:.0%} {where}" if prompt else f"– {where}"
        for tier, where in (("device", "on the device"), ("host", "on host"))
    ]
    moved_mib_s = {
        way: (report["swap"][f"{way}_bytes"] - (before or report)["swap"][f"{way}_bytes"])
        / interval_s
        / 2**20
        for way in ("out", "in")
    }
    evicted = sum(
        report[name]["evicted_tokens"] - (before or report)[name]["evicted_tokens"]
        for name in ("device", "host")
        if report[name] is not None
    )
    lines += [
        f"{grown['requests'] / interval_s:,.1f} requests/s, {prompt / interval_s:,.0f} prompt "
        f"tokens/s, found {', '.join(found)}",
        f"{evicted / interval_s:,.0f} tokens/s evicted, {moved_mib_s['out']:,.1f} MiB/s to host, "
        f"{moved_mib_s['in']:,.1f} MiB/s back",
    ]
    for title, rows in (("stays longest", hottest), ("leaves first", coldest)):
        cells = [[row[name] for name in _COLUMNS] for row in rows]
        lines += ["", title, table(list(_COLUMNS.values()), cells)]
    return "\n".join(lines)
