"""Kept-alive HTTP connections to one server.

Python's `http.client` with connections that are used again takes a client a tenth of the CPU time
that SGLang's or the package requests' ways take for a short request; those were more than all else
that a speculation costs.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.client import (
    HTTP_PORT,
    HTTPS_PORT,
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
)
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import orjson
from sglang.utils import http_request

from rag_radix_frontend.processes import PerProcess

# Servers close what is idle for long: SGLang after 5 seconds. Beyond so many, none is kept.
_MAX_IDLE_S = 3.0
_MAX_IDLE = 64
_PIECE_BYTES = 65_536
# Within which a reply ends whose last word has come; a new connection may take as long.
_LAST_S = 0.05


class StaleConnection(ConnectionResetError):
    """A connection that was kept has been closed before a reply began, likely unasked."""


class Connections(PerProcess):
    """Connections to a server, each of which has one request at a time. Safe to share.

    Attributes:
        is_proxied: Whether the server is behind a proxy, as the environment says.
    """

    def __init__(self, base_url: str, api_key: str | None = None, verify: str | None = None):
        """`verify` is a file of certificates to trust instead of the system's."""
        self._base_url, self._api_key, self._verify = base_url, api_key, verify
        parts = urlsplit(base_url)
        assert parts.hostname is not None
        is_secure = parts.scheme == "https"
        # Without a port, `http.client` would look for one behind the last colon of an IPv6 address.
        self._address = parts.hostname, parts.port or (HTTPS_PORT if is_secure else HTTP_PORT)
        self._tls = ssl.create_default_context(cafile=verify) if is_secure else None
        self._path = parts.path
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.is_proxied = parts.scheme in getproxies() and not proxy_bypass(parts.netloc)
        super().__init__()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        # With the time since when. The one used last is at the end.
        self._idle: list[tuple[HTTPConnection, float]] = []

    def request(
        self,
        route: str,
        data: Any = None,
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        once: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The reply to a POST of `data` as JSON, or to a GET where there is none.

        It has `status_code`, `json()` and `text`, and with `stream` `iter_lines()` and `close()`,
        as replies of the package requests have. With `timeout_s`, the server has so long for each
        of its steps. Behind a proxy SGLang's client is used, which knows no such limit and no
        `headers` beyond the usual ones.

        The server may see a request twice, on a kept connection that it closed without a reply and
        on the next one, unless it is to be sent `once`.

        Raises:
            StaleConnection: with `once`, the connection was such a one.
            OSError: the server can't be reached or doesn't answer.
        """
        if self.is_proxied:
            url, api_key, verify = self._base_url + route, self._api_key, self._verify
            return http_request(url, json=data, stream=stream, api_key=api_key, verify=verify)
        method = "GET" if data is None else "POST"
        body = None if data is None else orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS)
        with _system_errors():
            all_headers = {**self._headers, **headers} if headers else self._headers
            reply = self._exchange(method, self._path + route, body, all_headers, timeout_s, once)
            if not stream:
                with contextlib.closing(reply):
                    reply.read()
            return reply

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float | None,
        once: bool,
    ) -> _Reply:
        while True:
            connection = self._take()
            try:
                is_new = connection is None
                if connection is None:
                    connection = self._connect(timeout_s)
                assert connection.sock is not None
                connection.sock.settimeout(timeout_s)
                connection.request(method, path, body, headers)
                return _Reply(connection, self._give_back)
            except BaseException as error:
                if connection is not None:
                    connection.close()
                # The server may have closed a connection just when it was used again.
                if is_new or not isinstance(error, ConnectionError):
                    raise
                if once:
                    raise StaleConnection(f"a kept connection was closed: {error}") from error

    def _connect(self, timeout_s: float | None) -> HTTPConnection:
        if self._tls is None:
            connection = _Connection(*self._address, timeout=timeout_s)
        else:
            connection = _TlsConnection(*self._address, timeout=timeout_s, context=self._tls)
        connection.connect()
        return connection

    def _take(self) -> HTTPConnection | None:
        with self._lock:
            while self._idle:
                connection, since_s = self._idle.pop()
                if time.monotonic() - since_s < _MAX_IDLE_S and _is_silent(connection.sock):
                    return connection
                connection.close()
        return None

    def _give_back(self, connection: HTTPConnection) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._idle.append((connection, now_s))
            while len(self._idle) > _MAX_IDLE or now_s - self._idle[0][1] >= _MAX_IDLE_S:
                self._idle.pop(0)[0].close()

    def __del__(self) -> None:
        for connection, _ in getattr(self, "_idle", ()):
            connection.close()


class _Connection(HTTPConnection):
    """Sends a request's head and body as one: two sends are two system calls, and wake the server
    twice."""

    def request(self, *args: Any, **options: Any) -> None:
        self._pieces: list[bytes] = []
        super().request(*args, **options)
        self.sock.sendall(b"".join(self._pieces))

    def send(self, data: Any) -> None:
        """Keep it until there is all of the request."""
        self._pieces.append(data)


class _TlsConnection(_Connection, HTTPSConnection):
    """The same with encryption."""


class _Reply:
    """A reply, whose connection is used again once all of it is read."""

    def __init__(
        self, connection: HTTPConnection, give_back: Callable[[HTTPConnection], None]
    ) -> None:
        self._connection: HTTPConnection | None = connection
        self._give_back = give_back
        self._response: HTTPResponse = connection.getresponse()
        self._content: bytes | None = None
        self.status_code = self._response.status

    def read(self) -> bytes:
        if self._content is None:
            with _system_errors():
                self._content = self._response.read()
            self._done()
        return self._content

    def json(self) -> Any:
        content = self.read()
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            # Cut short in its head, a reply doesn't say how long it was to be.
            if self.status_code == HTTPStatus.OK:
                raise ConnectionResetError(f"the server's reply is broken: {error}") from error
            raise

    @property
    def text(self) -> str:
        return self.read().decode("utf-8", errors="replace")

    def iter_lines(self) -> Iterator[bytes]:
        """Lines as they come."""
        rest = b""
        with _system_errors():
            while piece := self._response.read1(_PIECE_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                yield from lines
        self._done()
        if rest:
            yield rest

    def finish(self) -> None:
        """Read the end of a reply that has nothing more to say, if it comes at once."""
        connection = self._connection
        if connection is None or connection.sock is None:
            return
        with contextlib.suppress(OSError, HTTPException):
            connection.sock.settimeout(_LAST_S)
            # An empty line may precede it.
            if not (self._response.read1(_PIECE_BYTES) and self._response.read1(_PIECE_BYTES)):
                self._done()

    def close(self) -> None:
        """Give up what hasn't been read."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._response.close()
            connection.close()

    def _done(self) -> None:
        self._response.close()
        connection, self._connection = self._connection, None
        if connection is not None and connection.sock is not None:
            self._give_back(connection)


def finish(reply: Any) -> None:
    """All is read of a streamed reply that matters: its connection can be used again."""
    if isinstance(reply, _Reply):  # others have a connection of their own
        reply.finish()


def _is_silent(connected: socket.socket | None) -> bool:
    """Whether a connection may be used again: what comes unasked is its end."""
    if connected is None:
        return False
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return not poll.poll(0)


@contextlib.contextmanager
def _system_errors() -> Iterator[None]:
    """A reply that is no HTTP, or cut short, is an error of the connection."""
    try:
        yield
    except HTTPException as error:
        raise ConnectionResetError(f"the server's reply is broken: {error!r}") from error
