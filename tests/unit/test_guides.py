"""What README.md and OPERATING.md say that can be looked up."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from rag_radix.control.commands import add_control_commands
from rag_radix.http_routes import add_routes
from rag_radix.settings import _TREE_KEYS

ROOT = Path(__file__).parents[2]
GUIDES = ("README.md", "OPERATING.md")


def guides() -> str:
    return "\n".join((ROOT / name).read_text() for name in GUIDES)


def test_every_setting_is_in_the_table_and_every_row_is_a_setting() -> None:
    table = guides().partition("| key | meaning |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = [name for row in rows for name in re.findall("`([a-z_]+)`", row)]
    assert sorted(named) == sorted(_TREE_KEYS)


def test_operators_commands_are_what_the_command_line_takes() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_control_commands(commands)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", guides(), re.DOTALL | re.MULTILINE)
    lines = (
        "\n".join(text for language, text in blocks if not language)
        .replace("\\\n", " ")
        .splitlines()
    )
    ours = [
        shlex.split(line, comments=True)[1:]
        for line in lines
        if line.startswith("rag-radix ") and line.split()[1] in commands.choices
    ]
    assert {words[0] for words in ours} >= {"invalidate", "warm"}
    for words in ours:
        assert parser.parse_args(words).run


@pytest.mark.filterwarnings("ignore:ORJSONResponse")
def test_every_route_that_is_named_exists() -> None:
    app = FastAPI()
    add_routes(app, SimpleNamespace, SimpleNamespace)  # type: ignore[arg-type]
    paths = {path for route in app.routes if (path := getattr(route, "path", ""))}
    named = set(re.findall(r"/rag/[a-z]+", guides()))
    assert named
    assert named <= paths
