"""After every test on a server with the knowledge tree, the tree is checked."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def intact(request: pytest.FixtureRequest) -> Iterator[None]:
    shared = request.getfixturevalue("server") if "server" in request.fixturenames else None
    yield
    if shared is None:
        return
    try:
        report = shared.get("/rag/stats")
    except urllib.error.HTTPError as error:
        if error.code == 404:  # another cache than ours
            return
        raise
    assert report["integrity"] == "ok"
