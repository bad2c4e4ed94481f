"""Which code a figure was measured with, so that none is taken for another code's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path


@cache
def code_digest(*modules: str) -> str:
    """Digest of SGLang's version and of the source of modules and packages.

    It is taken once in a process: what changes while it runs is nothing that it runs.

    Args:
        modules: By the names they are imported by.
    """
    digest = hashlib.blake2b(version("sglang").encode(), digest_size=8)
    for module in modules:
        for path in _sources(module):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(module: str) -> Iterator[Path]:
    spec = find_spec(module)
    assert spec is not None
    if spec.submodule_search_locations is None:
        assert spec.origin is not None
        yield Path(spec.origin)
    else:
        for folder in spec.submodule_search_locations:
            yield from sorted(Path(folder).rglob("*.py"))
