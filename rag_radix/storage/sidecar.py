"""The file of statistics: written whole now and then, by one rank, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from rag_radix.storage.segment import remove_leftovers, write_atomically

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_INTERVAL_S = 10.0
# Of the time, writing takes at most a part.
_LEAST_SHARE = 50
_FINISH_S = 5.0


class Sidecar:
    """Reads at start what an earlier server has written, and writes what this one knows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread: threading.Thread | None = None
        self._next_s = time.monotonic() + _INTERVAL_S
        self._has_warned = False
        self._known = b""  # digest of what this server has read or written

    def read(self) -> bytes:
        """The verified text; empty where there is none, or one that is damaged."""
        try:
            remove_leftovers(self._path.parent)
            digest, _, text = self._path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return b""
        except OSError as error:
            logger.warning("Storage: %s can't be read and is ignored: %s", self._path, error)
            return b""
        if digest != _digest(text):
            logger.warning("Storage: %s is damaged and is ignored", self._path)
            return b""
        self._known = digest
        return text

    def _read_others(self) -> bytes:
        """What another server has written since; empty where there is none."""
        try:
            digest, _, text = self._path.read_bytes().partition(b"\n")
        except OSError:
            return b""
        return text if digest != self._known and digest == _digest(text) else b""

    def is_due(self) -> bool:
        """Whether it is time to write again."""
        at_rest = self._thread is None or not self._thread.is_alive()
        return at_rest and time.monotonic() >= self._next_s

    def write(self, collect: Callable[[bytes], dict[str, Any]]) -> None:
        """Write what `collect`, called on the thread with what another server has written
        meanwhile, returns."""
        self._thread = threading.Thread(target=self._write, args=(collect,), daemon=True)
        self._thread.start()

    def finish(self, collect: Callable[[bytes], dict[str, Any]]) -> None:
        """Write for the last time, after what is being written."""
        if self._thread is not None:
            self._thread.join(_FINISH_S)
        self._write(collect)

    def _write(self, collect: Callable[[bytes], dict[str, Any]]) -> None:
        started = time.monotonic()
        text = orjson.dumps(collect(self._read_others()), default=list)  # of a named tuple
        digest = _digest(text)
        try:
            write_atomically(self._path, (digest, b"\n", text))
            self._known = digest
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                logger.warning("Storage: %s can't be written: %s", self._path, error)
            self._has_warned = True
        now = time.monotonic()
        self._next_s = now + max(_INTERVAL_S, _LEAST_SHARE * (now - started))


def _digest(text: bytes) -> bytes:
    return sha256(text).hexdigest().encode()
