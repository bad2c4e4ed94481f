"""A TCP proxy before an HTTP server that breaks replies off at chosen bytes."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from urllib.parse import urlsplit

# Closing then sends no end of the stream but a reset.
_RESET = struct.pack("ii", 1, 0)


class BreakingProxy:
    """Passes on all that is asked of a server.

    Attributes:
        cuts: For each of the next requests for `/generate` after how many bytes its reply breaks
            off, None for never. Further ones pass.
        resets: Break off with a reset instead of an end.
    """

    def __init__(self, server_url: str) -> None:
        parts = urlsplit(server_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.cuts: list[int | None] = []
        self.resets = False
        self._server = parts.hostname, parts.port
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def hears(self, asked: bytes) -> None:
        """Called with each request, for subclasses."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                _Pair(self, client, socket.create_connection(self._server))


class _Pair:
    """A client's connection and its counterpart to the server."""

    def __init__(self, proxy: BreakingProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._left: int | None = None
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for way in (self._ask, self._answer):
            threading.Thread(target=way, daemon=True).start()

    def _ask(self) -> None:
        with contextlib.suppress(OSError):
            while asked := _request(self._client):
                self._proxy.hears(asked)
                is_cut = asked.startswith(b"POST /generate ") and self._proxy.cuts
                self._left = self._proxy.cuts.pop(0) if is_cut else None
                self._server.sendall(asked)
        self._server.close()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while piece := self._server.recv(65_536):
                self._client.sendall(piece[: self._left])
                if self._left is not None:
                    self._left = max(0, self._left - len(piece))
                    if self._left == 0:
                        break
        if self._proxy.resets:
            self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        with contextlib.suppress(OSError):
            # The other thread reads from it, and would keep it open.
            self._client.shutdown(socket.SHUT_RD if self._proxy.resets else socket.SHUT_RDWR)
        self._client.close()


def _request(client: socket.socket) -> bytes:
    """A whole request, or nothing at the end of a connection."""
    head, body, missing = b"", b"", 0
    while b"\r\n\r\n" not in head or missing > len(body):
        if not (piece := client.recv(65_536)):
            return b""
        head, separator, body = (head + body + piece).partition(b"\r\n\r\n")
        head += separator
        length = re.search(rb"(?i)content-length: (\d+)", head)
        missing = int(length[1]) if length else 0
    return head + body
