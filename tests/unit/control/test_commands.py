"""The commands, against a server of canned answers."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.frontend.test_connections import self_signed

from rag_radix.cli import main
from rag_radix.control import warming
from rag_radix.control.tables import bar, printable, shortened, table
from rag_radix.replay.trace import TraceDocument, TraceRequest, write_trace
from rag_radix.statistics import DocumentKey

ROW = {
    "id": "wiki/1\x1b[31m",
    "version": "3",
    "namespace": "",
    "tokens": 1234,
    "device_tokens": 1234,
    "host_tokens": 34,
    "frequency": 5,
    "device_hits": 3,
    "host_hits": 1,
    "positions": 2,
    "priority": 0.25,
    "pinned": True,
}
AMOUNT = {"nodes": 1, "device_tokens": 1200, "host_tokens": 34, "bytes": 3 << 20}
REMOVED = {"places": 2, "paths": [["a"]], "freed": AMOUNT, "in_use": AMOUNT, "requests": 1}
REMOVED |= {"storage": {"directory": "/d", "files": 4, "left_files": 0, "is_read": True}}


class Canned:
    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.calls: list[tuple[str, Any, str | None]] = []
        self.url = ""


@pytest.fixture
def server() -> Iterator[Canned]:
    with answering() as canned:
        yield canned


@contextmanager
def answering(certificate: tuple[Path, Path] | None = None) -> Iterator[Canned]:
    """A server, over TLS where it has a certificate and its key."""
    canned = Canned()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            key = self.headers.get("Authorization")
            canned.calls.append((self.path, json.loads(body) if body else None, key))
            status, answer = canned.answers[self.path.partition("?")[0]]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *args: Any) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    canned.url = f"http://127.0.0.1:{http.server_port}"
    if certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*certificate)
        http.socket = tls.wrap_socket(http.socket, server_side=True)
        canned.url = f"https://localhost:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield canned
    http.shutdown()
    thread.join()
    http.server_close()


def test_documents_are_a_table_in_which_ids_are_escaped(server, capsys):
    server.answers["/rag/documents"] = 200, {"total": 1, "offset": 0, "documents": [ROW]}
    assert main(["documents", "--url", server.url, "--prefix", "wiki/", "--api-key", "k"]) == 0
    header, row, total = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["id", "version", "namespace"]
    assert row.startswith(r"wiki/1\x1b[31m  3")
    assert "1,234" in row
    assert total == "1–1 of 1 document"
    ((path, body, key),) = server.calls
    assert path == "/rag/documents?sort=frequency&limit=100&offset=0&prefix=wiki%2F"
    assert (body, key) == (None, "Bearer k")


def test_json_is_the_answer_as_it_is(server, capsys):
    answer = {"ranks": [{"total": 0, "offset": 0, "documents": []}] * 2}
    server.answers["/rag/documents"] = 200, answer
    assert main(["documents", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer
    assert main(["documents", "--url", server.url]) == 0
    assert "data-parallel rank 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "body"),
    [
        (["a/1"], {"id": "a/1"}),
        (["a/1", "--version", "3"], {"id": "a/1", "version": "3"}),
        (["--prefix", "a/", "--namespace", ""], {"prefix": "a/", "namespace": ""}),
        (["--all"], {"all": True}),
    ],
)
def test_invalidate_says_which_documents(server, capsys, options, body):
    server.answers["/rag/invalidate"] = 200, REMOVED
    assert main(["invalidate", "--url", server.url, *options]) == 0
    assert server.calls[0][1] == body
    out = capsys.readouterr().out
    assert out.startswith("2 places: 1,200 tokens on the device and 34 on host freed (3.0 MiB)")
    assert "1,234 more once what uses them ends; 1 request in progress" in out


def test_pins_are_given_and_listed(server, capsys):
    server.answers["/rag/pin"] = 200, {"places": 3}
    server.answers["/rag/unpin"] = 200, {"pins": 1}
    tier = {"budget_tokens": 100, "pinned_tokens": 50, "places": 1}
    pin = {"id": "a\x07", "tier": "host", "expires_in_s": 61.0}
    server.answers["/rag/pins"] = 200, {"pins": [pin], "tiers": {"host": tier}}
    url = ["--url", server.url]
    assert main(["pin", "a", "--version", "3", "--tier", "host", "--ttl", "60", *url]) == 0
    assert main(["unpin", "a", *url]) == 0
    assert [body for _, body, _ in server.calls] == [
        {"id": "a", "version": "3", "tier": "host", "ttl_s": 60.0},
        {"id": "a"},
    ]
    assert main(["pins", *url]) == 0
    pinned, unpinned, tiers, _, row = capsys.readouterr().out.splitlines()
    assert (pinned, unpinned) == ("pinned at 3 places", "1 pin given up")
    assert "50 of 100 tokens that may be pinned, 1 place" in tiers
    assert row.split() == [r"a\x07", "host", "61", "s"]


PROGRESS = {"state": "running", "documents": 2, "warmed": 1, "failed": 1, "refusals": 3}


def test_documents_of_a_file_are_warmed_as_programs_have_them(server, tmp_path, capsys):
    source = tmp_path / "handbook.jsonl"
    source.write_text('{"id": "a", "text": "one"}\n{"id": "b", "text": "two", "version": "2"}\n')
    server.answers["/rag/warm"] = 200, {**PROGRESS, "problem": "'b': too \x1b long"}
    url = ["--url", server.url]
    assert main(["warm", str(source), "--prefix", "Hi. ", *url]) == 0
    assert server.calls[-1][1] == {
        "prefix": "Hi. ",
        "documents": [
            {"id": "a", "version": "", "text": "one\n\n"},
            {"id": "b", "version": "2", "text": "two\n\n"},
        ],
        "tokens_per_s": 10_000.0,
    }
    assert capsys.readouterr().out == (
        "running: 1 of 2 documents, 3 times gave way to requests, "
        "1 failed, the last one 'b': too \\x1b long\n"
    )
    assert main(["warm", str(source), "--ids", "b", "a", "--template", "[{text}]", *url]) == 0
    assert [each["text"] for each in server.calls[-1][1]["documents"]] == ["[two]", "[one]"]
    assert main(["warm", str(source), "--ids", "c", *url]) == 2
    assert "has no document 'c'" in capsys.readouterr().err
    assert main(["warm", str(tmp_path / "none"), *url]) == 2
    assert main(["warm", *url]) == main(["warm", "--stop", *url]) == 0
    assert server.calls[-1][1] is None


def test_those_documents_of_a_trace_are_warmed_that_pay_most(server, tmp_path):
    source, trace = tmp_path / "handbook.jsonl", tmp_path / "trace.jsonl"
    source.write_text("".join(f'{{"id": "{name}", "text": "{name}"}}\n' for name in "abc"))
    spans = [[("a", 0, 10)], [("b", 0, 30), ("a", 30, 40)], [("a", 0, 10)], [("c", 0, 20)]]
    write_trace(
        trace,
        [
            TraceRequest(0.0, tuple(TraceDocument(n, "", s, e) for n, s, e in documents), 50)
            for documents in spans
        ],
    )
    server.answers["/rag/warm"] = 200, {**PROGRESS, "problem": None}
    options = ["warm", str(source), "--trace", str(trace), "--top", "2", "--url", server.url]
    assert main(options) == 0
    assert [each["id"] for each in server.calls[-1][1]["documents"]] == ["a", "b"]


def test_of_a_trace_with_tenants_those_documents_are_warmed_that_pay_most_for_the_one(
    server, tmp_path, capsys
):
    source, trace = tmp_path / "handbook.jsonl", tmp_path / "trace.jsonl"
    source.write_text("".join(f'{{"id": "{name}", "text": "{name}"}}\n' for name in "abc"))
    documents = tuple(TraceDocument(n, "", i * 10, i * 10 + 10) for i, n in enumerate("abc"))
    one = DocumentKey("", cache_salt="one").namespace
    requests = [(one, (0, 1)), (one, (0, 1)), (one, (1,)), ("shop", (2,))]
    write_trace(
        trace,
        [
            TraceRequest(0.0, tuple(documents[i] for i in which), 50, 0, namespace, shared)
            for namespace, which in requests
            for shared in ([10] if 0 in which else [0])  # the document "a" is public
        ],
    )
    server.answers["/rag/warm"] = 200, {**PROGRESS, "problem": None}
    options = ["warm", str(source), "--trace", str(trace), "--url", server.url]
    for tenant, ids in (
        (["--cache-salt", "one"], ["b"]),
        ([], ["a"]),
        (["--cache-salt", "two", "--trace-namespace", "shop"], ["c"]),
    ):
        assert main([*options, *tenant]) == 0
        assert [each["id"] for each in server.calls[-1][1]["documents"]] == ids
    assert main([*options, "--cache-salt", "two"]) == 2
    told = capsys.readouterr().err
    assert f"only in: '', '{one}', 'shop'" in told
    assert "--trace-namespace" in told


def test_an_order_at_start_is_sent_once_the_server_is_up(server, tmp_path):
    order = {"documents": [{"id": "a", "text": "one"}]}
    path = tmp_path / "warm.json"
    path.write_text(json.dumps(order))
    server.answers["/health"] = 200, {}
    server.answers["/rag/warm"] = 200, PROGRESS
    warming.at_start(server_args(server, path))
    while len(server.calls) < 2:
        time.sleep(0.01)
    assert server.calls == [("/health", None, None), ("/rag/warm", order, "Bearer admin")]


def server_args(server: Canned, warm: Path, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(
        radix_eviction_policy_config={"warm": str(warm)},
        url=lambda: server.url,
        **{"admin_api_key": "admin", "api_key": "user"},
        **{"ssl_certfile": None, "ssl_ca_certs": None, **options},
    )


def test_that_an_order_at_start_still_waits_is_logged(server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(warming, "_TELL_EVERY_S", 0.0)
    monkeypatch.setattr(warming, "_ASK_EVERY_S", 0.01)
    path = tmp_path / "warm.json"
    path.write_text(json.dumps({"documents": [{"id": "a", "text": "one"}]}))
    server.answers = {"/health": (503, {}), "/rag/warm": (200, PROGRESS)}
    warming.at_start(server_args(server, path))
    while "warming waits for" not in caplog.text:
        time.sleep(0.01)
    assert f"{server.url} to answer: HTTP Error 503" in caplog.text
    server.answers["/health"] = 200, {}
    while server.calls[-1][0] != "/rag/warm":
        time.sleep(0.01)


def test_a_server_warms_itself_over_tls_as_sglang_calls_itself(tmp_path):
    certificate, key = self_signed(tmp_path)
    path = tmp_path / "warm.json"
    path.write_text(json.dumps({"documents": [{"id": "a", "text": "one"}]}))
    for authorities in (None, str(certificate)):
        with answering((certificate, key)) as server:
            server.answers = {"/health": (200, {}), "/rag/warm": (200, PROGRESS)}
            options = {"ssl_certfile": str(certificate), "ssl_ca_certs": authorities}
            warming.at_start(server_args(server, path, **options))
            while len(server.calls) < 2:
                time.sleep(0.01)
            assert server.calls[-1][0] == "/rag/warm"


def test_a_certificate_is_checked_against_the_authorities_of_the_environment(
    tmp_path, monkeypatch, capsys
):
    certificate, key = self_signed(tmp_path)
    with answering((certificate, key)) as server:
        server.answers["/rag/pins"] = 200, {"pins": [], "tiers": {}}
        assert main(["pins", "--url", server.url]) == 2
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert main(["pins", "--url", server.url]) == 0


def test_a_refusal_is_told_with_its_reason(server, capsys):
    server.answers["/rag/invalidate"] = 404, {"error": {"message": "the document 'x' isn't\x07"}}
    assert main(["invalidate", "x", "--url", server.url]) == 2
    assert capsys.readouterr().err == (
        "rag-radix: the server answers 404: the document 'x' isn't\\x07\n"
    )
    server.answers["/rag/invalidate"] = 401, {"error": "Unauthorized"}
    assert main(["invalidate", "x", "--url", server.url]) == 2
    assert "give --api-key" in capsys.readouterr().err
    server.answers["/rag/invalidate"] = 404, {"detail": "Not Found"}
    assert main(["invalidate", "x", "--url", server.url]) == 2
    assert "knowledge-tree" in capsys.readouterr().err
    server.answers["/rag/invalidate"] = 200, b"<html>"
    assert main(["invalidate", "x", "--url", server.url]) == 2
    assert "doesn't answer as a server does" in capsys.readouterr().err
    assert main(["stats", "--url", "http://127.0.0.1:1"]) == 2
    assert "no server answers at http://127.0.0.1:1 ([Errno" in capsys.readouterr().err


def test_stats_are_bars_and_rates(server, capsys):
    tier = {"cached_tokens": 512, "capacity_tokens": 2048, "documents": 7, "evicted_nodes": 3}
    server.answers["/rag/stats"] = (
        200,
        {
            "policy": "pgdsf",
            "nodes": 11,
            "device": tier,
            "host": None,
            "requests": {
                "prompt_tokens": 1000,
                "device_hit_tokens": 500,
                "host_hit_tokens": 100,
                "requests": 4,
            },
            "swap": {"out_bytes": 5 << 20, "in_bytes": 0},
        },
    )
    assert main(["stats", "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert "█" * 8 + "░" * 22 + " 512 of 2,048 tokens, 7 documents, 3 nodes evicted" in out
    assert "50.0% of 1,000 prompt tokens on the device, 10.0% on host, in 4 requests" in out


def test_top_shows_tiers_rates_and_the_documents_at_both_ends(server, capsys):
    def look(requests, tokens):
        tier = {
            "cached_tokens": 10,
            "capacity_tokens": 20,
            "documents": 2,
            "evicted_tokens": tokens,
        }
        return {
            "policy": "pgdsf",
            "nodes": 3,
            "device": tier,
            "host": None,
            "control": {"pins": {"device": {"pinned_tokens": 5}, "host": {"pinned_tokens": 0}}},
            "requests": {
                "requests": requests,
                "prompt_tokens": tokens,
                "device_hit_tokens": tokens // 2,
                "host_hit_tokens": 0,
            },
            "swap": {"out_bytes": tokens << 20, "in_bytes": 0},
        }

    looks = iter([look(0, 0), look(4, 200)])
    server.answers["/rag/documents"] = 200, {"total": 1, "offset": 0, "documents": [ROW]}

    class Looks(dict):
        def __getitem__(self, path):
            return (200, next(looks)) if path == "/rag/stats" else super().__getitem__(path)

    server.answers = Looks(server.answers)
    assert main(["top", "--url", server.url, "--interval", "0.5", "--times", "2"]) == 0
    out = capsys.readouterr().out
    assert "found – on the device" in out
    assert "8.0 requests/s, 400 prompt tokens/s, found 50% on the device, 0% on host" in out
    assert "400 tokens/s evicted, 400.0 MiB/s to host, 0.0 MiB/s back" in out
    assert "10 of 20 tokens, 2 documents, 5 tokens pinned" in out
    assert out.count(r"wiki/1\x1b[31m") == 4
    assert "\x1b" not in out
    orders = [path for path, _, _ in server.calls if path.startswith("/rag/documents")]
    assert ["order=desc" in path for path in orders] == [True, False] * 2


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e300"])
@pytest.mark.parametrize("command", [["top", "--interval"], ["pin", "a", "--ttl"]])
def test_a_time_is_a_number_of_seconds(command, text, capsys):
    with pytest.raises(SystemExit):
        main([*command, text])
    assert "isn't a number of seconds above 0" in capsys.readouterr().err


def test_tables_keep_what_clients_wrote_in_its_place():
    assert printable("a\u202eb\n") == r"a\u202eb\n"
    assert shortened("x" * 100) == "x" * 59 + "…"
    assert table(["id", "n"], [["a", 1], ["bcd", 20]]) == "id    n\na     1\nbcd  20"
    assert bar(5, 0) == "░" * 30
    assert bar(9, 3) == "█" * 30


def test_a_tenant_is_named_by_its_salt_which_stays_here(server, tmp_path, capsys):
    server.answers["/rag/documents"] = 200, {"total": 0, "offset": 0, "documents": []}
    server.answers["/rag/invalidate"] = 200, REMOVED
    server.answers["/rag/warm"] = 200, {**PROGRESS, "problem": None}
    url = ["--url", server.url]
    salt, name = ["--cache-salt", "secret"], DocumentKey("", cache_salt="secret").namespace
    assert main(["documents", *salt, *url]) == 0
    assert server.calls[-1][0].endswith(f"namespace={name}")
    assert main(["invalidate", "--all", *salt, *url]) == 0
    assert server.calls[-1][1] == {"all": True, "namespace": name}
    assert main(["invalidate", "a", "--namespace", "x", *salt, *url]) == 2
    assert "give either --namespace, or --cache-salt" in capsys.readouterr().err
    source = tmp_path / "notes.jsonl"
    source.write_text('{"id": "a", "text": "one"}\n')
    assert main(["warm", str(source), *salt, "--shared-prefix", *url]) == 0
    order = server.calls[-1][1]
    assert (order["cache_salt"], order["salt_from"]) == ("secret", 0)


def test_a_reader_that_has_seen_enough_is_no_error(server):
    rows = [{**ROW, "id": f"document {n}"} for n in range(5_000)]
    server.answers["/rag/documents"] = 200, {"total": 5_000, "offset": 0, "documents": rows}
    program = f"from rag_radix.cli import main; main(['documents', '--url', {server.url!r}])"
    command = f'{sys.executable} -c "{program}" | head -2'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr == ""


def test_a_page_says_which_documents_it_has(server, capsys):
    for offset, rows, said in (
        (0, 2, "1–2 of 12 documents"),
        (10, 2, "11–12 of 12 documents"),
        (20, 0, "none of 12 documents"),
    ):
        answer = {"total": 12, "offset": offset, "documents": [ROW] * rows}
        server.answers["/rag/documents"] = 200, answer
        assert main(["documents", "--url", server.url]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == said
