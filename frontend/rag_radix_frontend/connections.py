"""Kept-alive HTTP connections to one server, at little CPU time a request.

A short request takes Python's own clients a quarter to half a millisecond, five to ten times what
the system takes for it: more than everything else that a speculation costs a client. A server of
SGLang needs little of HTTP, so its messages are written and read here.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import orjson
from sglang.utils import http_request

# Servers close what is idle for long: SGLang after 5 seconds. Beyond so many, none is kept.
_MAX_IDLE_S = 3.0
_MAX_IDLE = 64
_MAX_LINE_BYTES = 65_536
_CUT_SHORT = "the server closed the connection before the end of its reply"


class Connections:
    """Connections to a server, each of which has one request at a time. Safe to share."""

    def __init__(self, base_url: str, api_key: str | None = None, verify: str | None = None):
        """`verify` is a file of certificates to trust instead of the system's."""
        self._base_url, self._api_key, self._verify = base_url, api_key, verify
        parts = urlsplit(base_url)
        assert parts.hostname is not None
        self._tls = ssl.create_default_context(cafile=verify) if parts.scheme == "https" else None
        self._address = (parts.hostname, parts.port or (443 if self._tls else 80))
        self._path = parts.path
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key is not None else ""
        self._headers = (
            f" HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
            f"Content-Type: application/json\r\n{authorization}Content-Length: "
        )
        self._is_proxied = parts.scheme in getproxies() and not proxy_bypass(parts.netloc)
        self._lock = threading.Lock()
        # The one used last is at the end.
        self._idle: list[_Connection] = []
        self._process = os.getpid()

    def request(
        self, route: str, data: Any = None, *, stream: bool = False, timeout_s: float | None = None
    ) -> Any:
        """The reply to a POST of `data` as JSON, or to a GET where there is none.

        It has `status_code`, `json()` and `text`, and with `stream` `iter_lines()` and `close()`,
        as replies of the package requests have. With `timeout_s`, the server has so long for each
        of its steps. Behind a proxy SGLang's client is used, which knows no such limit.

        Raises:
            OSError: the server can't be reached or doesn't answer.
        """
        if self._is_proxied:
            url, api_key, verify = self._base_url + route, self._api_key, self._verify
            return http_request(url, json=data, stream=stream, api_key=api_key, verify=verify)
        body = b"" if data is None else orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS)
        method = "GET" if data is None else "POST"
        head = f"{method} {self._path}{route}{self._headers}{len(body)}\r\n\r\n"
        response = self._exchange(head.encode("latin-1") + body, timeout_s)
        if not stream:
            response.read()
        return response

    def _exchange(self, message: bytes, timeout_s: float | None) -> _Response:
        while True:
            connection = self._take()
            try:
                is_new = connection is None
                if connection is None:
                    connection = self._connect(timeout_s)
                connection.socket.settimeout(timeout_s)
                connection.socket.sendall(message)
                return _Response(connection, self._give_back)
            except BaseException as error:
                if connection is not None:
                    connection.close()
                # The server may have closed a connection just when it was used again.
                if is_new or not isinstance(error, ConnectionError):
                    raise

    def _connect(self, timeout_s: float | None) -> _Connection:
        connected = socket.create_connection(self._address, timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            connected = self._tls.wrap_socket(connected, server_hostname=self._address[0])
        return _Connection(connected)

    def _take(self) -> _Connection | None:
        with self._lock:
            if self._process != os.getpid():
                # They are the parent process's.
                self._process, self._idle = os.getpid(), []
            while self._idle:
                connection = self._idle.pop()
                if connection.is_good():
                    return connection
                connection.close()
        return None

    def _give_back(self, connection: _Connection) -> None:
        connection.idle_since_s = time.monotonic()
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


class _Connection:
    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.reader = connected.makefile("rb")
        self.idle_since_s = 0.0
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def is_good(self) -> bool:
        """Whether it may be used again: what comes unasked is its end."""
        idle_s = time.monotonic() - self.idle_since_s
        return idle_s < _MAX_IDLE_S and not self._poll.poll(0)

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


class _Response:
    """A reply, whose body is read as it comes."""

    def __init__(self, connection: _Connection, give_back: Callable[[_Connection], None]) -> None:
        self._connection: _Connection | None = connection
        self._give_back = give_back
        self._reader = connection.reader
        self._content: bytes | None = None
        version, status, *_ = self._line().split(None, 2)
        self.status_code = int(status)
        headers = {}
        while line := self._line().strip():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip().lower()
        self._is_chunked = headers.get(b"transfer-encoding") == b"chunked"
        length = headers.get(b"content-length")
        self._length = None if length is None else int(length)
        self._is_last = (
            version == b"HTTP/1.0"
            or headers.get(b"connection") == b"close"
            or (self._length is None and not self._is_chunked)
        )

    def read(self) -> bytes:
        """All of it, after which its connection can be used again."""
        if self._content is None:
            self._content = b"".join(self._pieces())
        return self._content

    def json(self) -> Any:
        return orjson.loads(self.read())

    @property
    def text(self) -> str:
        return self.read().decode("utf-8", errors="replace")

    def iter_lines(self) -> Iterator[bytes]:
        rest = b""
        for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
        if rest:
            yield rest

    def close(self) -> None:
        """Give up what hasn't been read."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _pieces(self) -> Iterator[bytes]:
        try:
            if self._is_chunked:
                while size := int(self._line().partition(b";")[0], 16):
                    yield self._exactly(size)
                    self._line()
                while self._line().strip():  # trailers
                    pass
            elif self._length is not None:
                yield self._exactly(self._length)
            else:
                yield self._reader.read()
            if not self._is_last and self._connection is not None:
                self._give_back(self._connection)
                self._connection = None
        finally:
            self.close()

    def _line(self) -> bytes:
        line = self._reader.readline(_MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionResetError(_CUT_SHORT)
        return line

    def _exactly(self, size: int) -> bytes:
        content = self._reader.read(size)
        if len(content) < size:
            raise ConnectionResetError(_CUT_SHORT)
        return content
