"""Connections to a server that sends, for each request, the bytes a test has written down."""

from __future__ import annotations

import contextlib
import gc
import re
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from rag_radix_frontend import connections as module
from rag_radix_frontend.connections import Connections, StaleConnection
from rag_radix_frontend.replies import events
from unit.frontend.test_processes import in_a_forked_process

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}'
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Server:
    """Answers one request after the other; a reply that ends with None closes the connection."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.replies: list[list[bytes | None]] = []
        self.asked: list[bytes] = []
        self.connected = 0
        self._tls = tls
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.connected += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self._tls is not None:
            try:
                client = self._tls.wrap_socket(client, server_side=True)
            except ssl.SSLError:  # the client doesn't trust it
                return
        with client:
            while asked := _request(client):
                self.asked.append(asked)
                for piece in self.replies.pop(0) if self.replies else [OK]:
                    if piece is None:
                        return
                    client.sendall(piece)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


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


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_a_connection_is_used_again(server: Server) -> None:
    connections = Connections(server.url)
    for _ in range(3):
        reply = connections.request("/x", {"b": "é"})
        assert (reply.status_code, reply.json(), reply.text) == (200, {"a": 1}, '{"a": 1}')
    assert connections.request("/y").json() == {"a": 1}
    assert server.connected == 1
    assert server.asked[0].startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % server.port)
    assert server.asked[0].endswith('\r\n\r\n{"b":"é"}'.encode())
    assert server.asked[3].startswith(b"GET /y HTTP/1.1\r\n")


def test_requests_at_once_have_a_connection_each(server: Server) -> None:
    connections = Connections(server.url)
    server.replies = [[STREAM, b"1\r\na\r\n", END], [OK]]
    stream = connections.request("/x", {}, stream=True)
    connections.request("/y", {})
    assert list(stream.iter_lines()) == [b"a"]
    assert server.connected == 2


def test_the_address_may_have_a_path_and_the_key_is_sent(server: Server) -> None:
    Connections(server.url + "/v1", api_key="secret").request("/x", {})
    assert server.asked[0].startswith(b"POST /v1/x ")
    assert b"Authorization: Bearer secret\r\n" in server.asked[0]


@pytest.mark.parametrize(
    "reply",
    [
        [STREAM, b"3\r\nab\n\r\n", b"4\r\nc\nde\r\n", END],
        [STREAM, b"7;note=1\r\nab\nc\nde\r\n0\r\nTrailer: 1\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nab", b"\nc\nde"],
        [b"HTTP/1.0 200 OK\r\n\r\nab\n", b"c\nde", None],
    ],
)
def test_lines_of_a_stream_are_whole_however_they_come(
    server: Server, reply: list[bytes | None]
) -> None:
    server.replies = [reply]
    connections = Connections(server.url)
    stream = connections.request("/x", {}, stream=True)
    assert list(stream.iter_lines()) == [b"ab", b"c", b"de"]
    assert connections.request("/x", {}).json() == {"a": 1}


@pytest.mark.parametrize(
    "reply",
    [
        [b"HTTP/1.1 200 OK\r\nCont", b'ent-Length: 8\r\n\r\n{"a": 1}'],
        [b'HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: 8\r\n\r\n{"a": 1}'],
        [b'HTTP/1.1 200 OK\r\nX: a\r\n b: c\r\nCONTENT-LENGTH:8\r\n\r\n{"a": 1}'],
        [b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}'],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n", STREAM[17:], b'8\r\n{"a": 1}\r\n', END],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n", b'8\r\n{"a": 1}\r\n', END],
    ],
)
def test_a_reply_is_the_same_however_its_head_is_written(
    server: Server, reply: list[bytes | None]
) -> None:
    server.replies = [reply]
    connections = Connections(server.url)
    for _ in range(2):
        assert connections.request("/x", {}).json() == {"a": 1}
    assert server.connected == 1


def test_a_refusal_keeps_its_status_and_the_connection(server: Server) -> None:
    server.replies = [[OK.replace(b"200 OK", b"503 Busy")]]
    connections = Connections(server.url)
    refused, taken = connections.request("/x", {}), connections.request("/x", {})
    assert (refused.status_code, refused.json()) == (503, {"a": 1})
    assert (taken.status_code, server.connected) == (200, 1)


def test_a_request_is_sent_as_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sends: list[bytes] = []
    sendall = socket.socket.sendall

    def noted(self: socket.socket, data: bytes) -> None:
        sends.append(data)
        sendall(self, data)

    monkeypatch.setattr(socket.socket, "sendall", noted)
    text = "long " * 100_000
    Connections(server.url).request("/x", {"text": text})
    assert [data for data in sends if data != OK] == server.asked
    assert server.asked[0].endswith(text.encode() + b'"}')


def test_connections_that_have_been_idle_for_long_are_closed(server: Server) -> None:
    connections = Connections(server.url)
    server.replies = [[STREAM, END], [STREAM, END]]
    for stream in [connections.request("/x", {}, stream=True) for _ in range(2)]:
        assert not list(stream.iter_lines())
    old, since_s = connections._idle[0]
    connections._idle[0] = old, since_s - module._MAX_IDLE_S
    connections.request("/x", {})
    assert old.sock is None
    assert server.connected == 2


def test_connections_are_closed_with_what_keeps_them(server: Server) -> None:
    connections = Connections(server.url)
    connections.request("/x", {})
    ((kept, _),) = connections._idle
    del connections
    gc.collect()
    assert kept.sock is None


@pytest.mark.parametrize(
    "reply",
    [
        b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 8\r\n\r\n{"a": 1}',
        b'HTTP/1.0 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}',
    ],
)
def test_a_connection_that_the_server_ends_is_not_used_again(server: Server, reply: bytes) -> None:
    server.replies = [[reply]]
    connections = Connections(server.url)
    assert connections.request("/x", {}).json() == {"a": 1}
    connections.request("/x", {})
    assert server.connected == 2


@pytest.mark.parametrize("looks_good", [False, True])
def test_what_was_closed_meanwhile_is_asked_on_a_new_connection(
    server: Server, looks_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if looks_good:  # It is closed while the request is on its way.
        monkeypatch.setattr(module, "_is_silent", lambda _: True)
    server.replies = [[OK, None]]
    connections = Connections(server.url)
    connections.request("/x", {})
    assert connections.request("/x", {}).json() == {"a": 1}
    assert server.connected == 2


def test_what_is_to_be_sent_once_is_not_sent_on_a_new_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_silent", lambda _: True)
    server.replies = [[OK, None]]
    connections = Connections(server.url)
    connections.request("/x", {})
    with pytest.raises(StaleConnection, match="kept connection"):
        connections.request("/x", {}, once=True)
    assert connections.request("/x", {}, once=True).json() == {"a": 1}


def test_a_reply_whose_head_is_cut_short_is_an_error(server: Server) -> None:
    server.replies = [[b"HTTP/1.1 200 OK\r\nContent-Le", None]]
    with pytest.raises(ConnectionError, match="reply is broken"):
        Connections(server.url).request("/x", {}).json()


@pytest.mark.parametrize("reply", [OK[:-1], STREAM + b"8\r\nabc", STREAM + b"3\r\nabc\r\n"])
def test_a_reply_that_is_cut_short_is_an_error(server: Server, reply: bytes) -> None:
    server.replies = [[reply, None]]
    with pytest.raises(ConnectionError, match="reply is broken"):
        Connections(server.url).request("/x", {})
    assert len(server.asked) == 1


def test_a_server_that_does_not_answer_is_given_up(server: Server) -> None:
    server.replies = [[]]
    connections = Connections(server.url)
    with pytest.raises(TimeoutError):
        connections.request("/x", {}, timeout_s=0.01)
    assert connections.request("/x", {}).json() == {"a": 1}
    assert server.connected == 2


def test_a_stream_that_is_closed_early_is_not_read_by_the_next_request(server: Server) -> None:
    server.replies = [[STREAM, b"2\r\na\n\r\n", b"2\r\nb\n\r\n"]]
    connections = Connections(server.url)
    stream = connections.request("/x", {}, stream=True)
    assert next(stream.iter_lines()) == b"a"
    stream.close()
    assert connections.request("/x", {}).json() == {"a": 1}
    assert server.connected == 2


DONE = b"e\r\ndata: [DONE]\n\n\r\n"


@pytest.mark.parametrize(
    "rest", [[DONE + END], [DONE, END], [b"d\r\ndata: [DONE]\n\r\n", b"1\r\n\n\r\n", END]]
)
def test_a_stream_whose_last_event_is_read_gives_its_connection_back(
    server: Server, rest: list[bytes | None]
) -> None:
    server.replies = [[STREAM, *rest]]
    connections = Connections(server.url)
    with contextlib.closing(connections.request("/x", {}, stream=True)) as stream:
        assert list(events(stream)) == []
    assert connections.request("/x", {}).json() == {"a": 1}
    assert server.connected == 1


@pytest.mark.parametrize("rest", [[], [b"1\r\na\r\n", b"1\r\nb\r\n"], [None], [b"zz\r\n"]])
def test_a_stream_that_does_not_end_after_its_last_event_is_given_up(
    server: Server, rest: list[bytes | None]
) -> None:
    server.replies = [[STREAM, DONE, *rest]]
    connections = Connections(server.url)
    with contextlib.closing(connections.request("/x", {}, stream=True)) as stream:
        assert list(events(stream)) == []
    assert connections.request("/x", {}).json() == {"a": 1}
    assert server.connected == 2


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://[2001:db8::5]", 80),
        ("https://[2001:db8::5]/v1", 443),
        ("http://[2001:db8::5]:30000", 30_000),
    ],
)
def test_the_address_may_be_an_ipv6_one(
    url: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(address: tuple[str, int], *_: object, **__: object) -> None:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(ConnectionRefusedError):
        Connections(url).request("/x", {})
    assert asked == [("2001:db8::5", port)]


def test_a_server_that_is_gone_is_an_error(server: Server) -> None:
    connections = Connections(server.url)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        connections.request("/x", {})


def test_a_forked_process_has_connections_of_its_own(server: Server) -> None:
    connections = Connections(server.url)
    connections.request("/x", {})
    assert in_a_forked_process(lambda: connections.request("/x", {}).json()) == {"a": 1}
    assert server.connected == 2
    connections.request("/x", {})
    assert server.connected == 2


def test_behind_a_proxy_it_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)  # It remembers the proxies.
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    assert Connections("http://elsewhere.invalid").request("/x", {}).json() == {"a": 1}
    assert server.asked[0].startswith(b"POST http://elsewhere.invalid/x ")


def self_signed(directory: Path) -> tuple[Path, Path]:
    """Files with a certificate for localhost and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = directory / "certificate.pem", directory / "key.pem"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    certificate_file.write_bytes(certificate.public_bytes(pem))
    key_file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return certificate_file, key_file


def test_certificates_are_checked_against_those_given(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server = Server(tls)
    url = f"https://localhost:{server.port}"
    connections = Connections(url, verify=str(certificate))
    assert connections.request("/x", {}).json() == {"a": 1}
    assert connections.request("/x", {}).json() == {"a": 1}
    assert server.connected == 1
    with pytest.raises(ssl.SSLCertVerificationError):
        Connections(url).request("/x", {})
    server.close()
