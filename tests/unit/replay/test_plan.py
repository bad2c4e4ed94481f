"""`rag-radix plan`: memory sizes, the knee, and a trace's skew."""

from __future__ import annotations

import re

import orjson
import pytest

from rag_radix.cli import main
from rag_radix.replay.plan import PlanCell, default_sizes, host_gib, knee, plan, table
from rag_radix.replay.runs import PolicyVariant, ReplayServer
from rag_radix.replay.skew import Skew, footprint_tokens, skew_of
from rag_radix.replay.trace import TraceDocument, TraceRequest, write_trace
from rag_radix.replay.workloads import generate

SERVER = ReplayServer(device_tokens=0, host_tokens=0)
PGDSF = PolicyVariant("pgdsf", "pgdsf")


def trace(requests: int = 300, seed: int = 3, **options: int) -> list[TraceRequest]:
    return generate(
        "mmlu-like",
        requests=requests,
        seed=seed,
        documents=600,
        mean_document_tokens=200,
        **options,
    )


def asked(*names: str, tokens: int = 100, namespace: str = "") -> TraceRequest:
    documents = tuple(
        TraceDocument(name, "", 160 + i * tokens, 160 + (i + 1) * tokens)
        for i, name in enumerate(names)
    )
    return TraceRequest(0.0, documents, 170 + len(names) * tokens, namespace=namespace)


def cell(device: int, host: int, saved: float) -> PlanCell:
    return PlanCell(device, host, saved, saved, 1.0, saved)


def test_more_memory_never_finds_much_less():
    cells = plan(trace(), PGDSF, SERVER, [2048, 8192], [0, 8192, 32768], warm_up=50)
    assert [(each.device_tokens, each.host_tokens) for each in cells] == [
        (device, host) for device in (2048, 8192) for host in (0, 8192, 32768)
    ]
    by_size = {(each.device_tokens, each.host_tokens): each for each in cells}
    for device in (2048, 8192):
        row = [by_size[device, host].saved_share for host in (0, 8192, 32768)]
        assert row == pytest.approx(sorted(row), abs=0.01)
    assert by_size[8192, 0].token_hit_rate > by_size[2048, 0].token_hit_rate


def test_what_is_saved_is_measured_against_templates_alone():
    requests = [asked("a"), *(asked(name) for name in "bcde")]
    (found,) = plan(requests, PGDSF, SERVER, [4096], [0], warm_up=1)
    assert found.prompt_hit_rate > 0.5
    assert found.saved_share == pytest.approx(0)


def test_the_knee_lies_farthest_above_the_straight_line():
    cells = [cell(10, 0, 0.1), cell(10, 90, 0.5), cell(10, 390, 0.7), cell(10, 990, 0.8)]
    assert knee(cells) == cells[1]
    assert knee(cells[:1]) == cells[0]
    assert knee([cell(10, 0, 0.0), cell(10, 90, 0.0)]).host_tokens == 0


def test_the_skew_is_the_share_of_the_top_documents():
    skew = skew_of([asked("a")] * 6 + [asked("b", "c")] + [asked(name) for name in "defghij"])
    assert skew.retrievals == (6, *[1] * 9)
    assert skew.share_of_top(0.10) == pytest.approx(6 / 15)
    assert skew.share_of_top(1.0) == 1
    parts, shares = skew.curve(11)
    assert (parts[1], shares[1]) == pytest.approx((0.1, 6 / 15))
    assert Skew(()).share_of_top(0.1) == 0


def test_a_generated_trace_shows_its_skew():
    skew = skew_of(generate("mmlu-like", requests=30_000, seed=1, documents=3_000))
    assert skew.share_of_top(0.03) == pytest.approx(0.60, abs=0.08)


def test_a_document_takes_room_behind_every_text_it_stands_behind():
    assert footprint_tokens([asked("a", "b"), asked("a", "b"), asked("a", "c")]) == 300
    assert footprint_tokens([asked("a", "b"), asked("b", "a")]) == 400
    assert footprint_tokens([asked("a"), asked("a", namespace="other")]) == 200


def test_default_sizes_run_every_request_and_end_with_all_documents():
    requests = trace()
    device, host = default_sizes(requests, 16)
    assert min(device) >= max(request.prompt_tokens for request in requests)
    assert host[0] == 0
    assert host[-1] >= footprint_tokens(requests) * 0.99
    assert all(tokens % 16 == 0 for tokens in device + host)
    assert device == sorted(device)
    assert host == sorted(host)


def test_a_trace_without_documents_has_nothing_to_keep_on_host():
    assert default_sizes([TraceRequest(0.0, (), 100)], 16)[1] == [0]


@pytest.mark.parametrize("tokens", [0, 16, 3200, 8192, 51_008, 209_712, 524_288, 12_345_678])
def test_a_host_size_is_printed_as_the_option_that_gives_it(tokens):
    text = host_gib(tokens, SERVER)
    assert int(float(text) * 2**30 // SERVER.kv_bytes_per_token) == tokens
    assert len(text) <= 9


def test_the_table_has_the_hit_rate_that_a_server_reports():
    head, _, row, *_ = table([PlanCell(1000, 0, 0.351, 0.4, 1.0, 0.402)], SERVER).splitlines()
    assert "of whole prompts, which a server reports" in head
    assert row.split(maxsplit=1) == ["1000", "*35.1 / 40.0 / 40.2"]


def test_the_printed_sizes_give_the_same_plan(capsys):
    arguments = ["plan", "--workload", "burst", "--requests", "12", "--json"]
    assert main(arguments) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    knee_line = next(line for line in lines if line.startswith("* knee"))
    gpu_tokens, host = re.search(r"--gpu-tokens (\d+) .*--host-gib ([\d.]+);", knee_line).groups()
    assert main([*arguments, "--gpu-tokens", gpu_tokens, "--host-gib", host]) == 0
    (cell,) = orjson.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert cell == orjson.loads(last)["knee"]


def test_the_command_prints_a_table_and_json_on_the_last_line(tmp_path, capsys):
    path, plot = tmp_path / "trace.jsonl", tmp_path / "plan.svg"
    write_trace(path, trace(150))
    arguments = ["plan", "--trace", str(path), "--gpu-tokens", "2000,8000", "--host-gib", "0,2"]
    has_matplotlib = _has_matplotlib()
    plotted = ["--plot", str(plot)] if has_matplotlib else []
    assert main([*arguments, *plotted, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = orjson.loads(lines[-1])
    assert len(found["cells"]) == 4
    assert found["knee"] in found["cells"]
    assert set(found["skew"]) == {"0.03", "0.1", "0.2"}
    assert sum("*" in line for line in lines) == 2
    assert any("top 3%" in line for line in lines)
    assert not has_matplotlib or "skew" in plot.read_text()


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--gpu-tokens", "1,x"),
        ("--gpu-tokens", "nan"),
        ("--gpu-tokens", "0"),
        ("--gpu-tokens", "15"),
        ("--host-gib", "-1"),
        ("--host-gib", "0,inf"),
        ("--policy", "lru,pgdsf"),
        ("--policy", "x"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(option, value, capsys):
    arguments = ["plan", "--workload", "burst", "--requests", "10", f"{option}={value}"]
    assert main(arguments) == 2
    assert value in capsys.readouterr().err
