"""`rag-radix simulate`, and what it adds up."""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
import warnings
from dataclasses import replace

import orjson
import pytest

from rag_radix.cli import main
from rag_radix.errors import ConfigError
from rag_radix.replay.options import check_variants, parse_variants, reporting
from rag_radix.replay.plan import add_plan_command
from rag_radix.replay.runs import PolicyVariant, ReplayServer, replay
from rag_radix.replay.simulate import (
    add_simulate_command,
    mean_and_spread,
    simulate,
    with_baseline,
)
from rag_radix.replay.trace import TraceDocument, TraceRequest, write_trace
from rag_radix.replay.workloads import generate

SERVER = ReplayServer(device_tokens=2048, host_tokens=8192)
PGDSF = PolicyVariant("pgdsf", "pgdsf")
WAYS = ("d2h", "h2d")
SMALL = ["--gpu-tokens", "20000", "--host-gib", "4", "--requests", "120", "--warm-up", "20"]


def trace(requests: int = 300, seed: int = 3) -> list[TraceRequest]:
    return generate(
        "mmlu-like", requests=requests, seed=seed, documents=600, mean_document_tokens=200
    )


def repeated(times: int) -> list[TraceRequest]:
    """One document of 1,600 tokens behind 160 of system prompt, again and again."""
    documents = (TraceDocument("a", "", 160, 1760),)
    return [TraceRequest(0.0, documents, 1800) for _ in range(times)]


def test_results_are_related_as_their_names_say():
    results = simulate(trace(), [PGDSF], SERVER, warm_up=50)
    assert list(results) == ["lru", "pgdsf"]
    lru, pgdsf = results["lru"], results["pgdsf"]
    assert lru.prefill_time_vs_lru == lru.hit_rate_vs_lru == 1
    assert pgdsf.prefill_time_vs_lru == pytest.approx(pgdsf.prefill_s / lru.prefill_s)
    for each in results.values():
        assert 0 < each.token_hit_rate <= each.bound_hit_rate
        assert 0 < each.bound_share <= 1
        assert each.d2h_bytes > 0
        assert each.h2d_bytes > 0


def test_a_cache_that_holds_everything_saves_nearly_what_the_bound_saves():
    server = ReplayServer(device_tokens=200_000, host_tokens=0)
    result = simulate(trace(), [], server)["lru"]
    assert result.bound_share == pytest.approx(1, abs=0.03)
    assert result.d2h_bytes == 0


def test_prefill_time_is_that_of_what_was_not_cached():
    totals = replay(repeated(5), PGDSF, SERVER, warm_up=1)
    assert totals.requests == 4
    assert totals.prompt_hit_rate == pytest.approx(1760 / 1800)
    assert totals.token_hit_rate == pytest.approx(1600 / 1800)
    assert totals.hit_documents == totals.documents == 4
    assert totals.prefill_s == pytest.approx(4 * SERVER.cost(1760, 40))


def test_a_load_back_costs_its_bytes_at_the_rate_of_the_bus():
    others = [TraceRequest(0.0, (TraceDocument(f"{n}", "", 160, 1760),), 1800) for n in range(3)]
    totals = replay([*repeated(1), *others, *repeated(1)], PGDSF, SERVER, warm_up=4)
    assert totals.host_hit_tokens >= 1600
    assert totals.h2d_bytes == totals.host_hit_tokens * SERVER.kv_bytes_per_token
    expected = SERVER.cost(1760, 40) + totals.h2d_bytes / SERVER.pcie_bytes_per_s
    assert totals.prefill_s == pytest.approx(expected)


def test_the_warm_up_is_served_but_not_counted():
    assert replay(repeated(3), PGDSF, SERVER, warm_up=1).hit_documents == 2
    assert replay(repeated(3), PGDSF, SERVER).hit_documents == 2
    assert replay(repeated(3), PGDSF, SERVER).documents == 3


def test_the_same_requests_are_counted_in_whatever_order_they_are_served():
    requests = trace(100)
    server = replace(SERVER, queue=40, reorder_window=32)
    totals = replay(requests, PGDSF, server, warm_up=30)
    assert totals.prompt_tokens == sum(each.prompt_tokens for each in requests[30:])
    assert totals.prompt_tokens != replay(requests, PGDSF, server, warm_up=29).prompt_tokens


def test_a_replay_decides_alike_every_time():
    first, second = (replay(trace(), PGDSF, SERVER) for _ in range(2))
    assert first.prefill_s == second.prefill_s
    assert first.d2h_bytes == second.d2h_bytes


def test_seeds_are_averaged_with_their_range():
    runs = [simulate(trace(150, seed), [PGDSF], SERVER) for seed in (1, 2)]
    means, spreads = mean_and_spread(runs)
    rates = [run["pgdsf"].token_hit_rate for run in runs]
    assert means["pgdsf"].token_hit_rate == pytest.approx(sum(rates) / 2)
    assert spreads["pgdsf"].token_hit_rate == pytest.approx(max(rates) - min(rates))


def test_policies_are_written_with_their_settings():
    common, own = parse_variants("lru, pgdsf:frequency=node:max_depth=3", '{"swap_out": "eager"}')
    assert common == PolicyVariant("lru", "lru", {"swap_out": "eager"})
    assert own.policy == "pgdsf"
    assert own.config == {"swap_out": "eager", "frequency": "node", "max_depth": 3}


@pytest.mark.parametrize(
    ("policies", "config", "message"),
    [
        ("pgdfs", None, "pgdfs.*lru.*pgdsf"),
        ("", None, "no policy"),
        ("pgdsf:node", None, "pgdsf:frequency=node"),
        ("lru", "{", "JSON"),
        ("lru", "[1]", "object"),
    ],
)
def test_policies_written_otherwise_are_explained(policies, config, message):
    with pytest.raises(ConfigError, match=message):
        parse_variants(policies, config)


@pytest.mark.parametrize(
    ("policies", "config", "said"),
    [
        ("pgdsf:frequency=bad", None, "frequency='bad' in --policy 'pgdsf:frequency=bad': use"),
        ("pgdsf", '{"half": 3}', "'half' in --policy-config isn't a setting of 'pgdsf'"),
        ("pgdsf:a=1", '{"b": 2}', "in --policy 'pgdsf:a=1' or --policy-config isn't"),
    ],
)
@pytest.mark.parametrize("command", [["simulate", "--gpu-tokens", "1000"], ["plan"]])
def test_settings_that_a_policy_does_not_take_are_refused_before_sglang_is_imported(
    command, policies, config, said
):
    arguments = [*command, "--workload", "burst", "--policy", policies]
    arguments += ["--policy-config", config] if config else []
    program = (
        "import sys; from rag_radix.cli import main; "
        f"status = main({arguments!r}); print('sglang' in sys.modules, status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "2"]
    assert said in done.stderr


def test_settings_for_the_others_are_none_of_the_baseline():
    check_variants(with_baseline(parse_variants("lru", '{"frequency": "node"}')), "{}")


def test_sglang_is_not_heard(capsys):
    heard = logging.getLogger("sglang").level

    def command(options):
        warnings.warn_explicit("no GPU", UserWarning, "awq.py", 1, module="sglang.srt.awq")
        logging.getLogger("sglang.srt.pool").warning("small")
        print("done")

    assert reporting(command)(None) == 0
    assert capsys.readouterr() == ("done\n", "")
    assert logging.getLogger("sglang").level == heard


def test_help_says_what_the_defaults_are():
    commands = argparse.ArgumentParser().add_subparsers()
    add_simulate_command(commands)
    add_plan_command(commands)
    for parser in commands.choices.values():
        for action in parser._actions:
            if action.default not in (None, False, argparse.SUPPRESS):
                assert "default" in action.help, action.option_strings


def test_the_command_prints_a_table_and_json_on_the_last_line(capsys):
    policies = "pgdsf,pgdsf:frequency=node"
    assert main(["simulate", "--workload", "burst", *SMALL, "--policy", policies, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = orjson.loads(lines[-1])
    assert list(found) == ["lru", "pgdsf", "pgdsf:frequency=node"]
    for key in ("token_hit_rate", "prefill_time_vs_lru", "bound_share", "d2h_bytes", "h2d_bytes"):
        assert isinstance(found["pgdsf"][key], float)
    assert [re.match(r"pgdsf +\d+\.\d\d%", line) is not None for line in lines].count(True) == 1
    row = next(line for line in lines if line.startswith("lru "))
    cells = re.search(r"([\d,.]+) s .* ([\d,.]+) GiB +([\d,.]+) GiB", row)
    in_json = [found["lru"]["prefill_s"], *(found["lru"][f"{way}_bytes"] / 2**30 for way in WAYS)]
    for cell, value in zip(cells.groups(), in_json, strict=True):
        assert float(cell.replace(",", "")) == pytest.approx(value, abs=0.06)
    assert any(line.startswith("bound") for line in lines)


def test_several_seeds_report_their_spread(capsys):
    assert main(["simulate", "--workload", "burst", *SMALL, "--seeds", "1,2", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert orjson.loads(last)["pgdsf"]["spread"]["token_hit_rate"] > 0
    assert any("±" in line for line in lines)


def test_a_trace_of_ones_own_is_replayed(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    write_trace(path, repeated(6))
    arguments = ["--gpu-tokens", "4096", "--warm-up", "1", "--policy", "lru", "--json"]
    assert main(["simulate", "--trace", str(path), *arguments]) == 0
    found = orjson.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["lru"]["document_hit_rate"] == 1


def test_a_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "policies.svg"
    assert main(["simulate", "--workload", "burst", *SMALL, "--plot", str(path)]) == 0
    assert "pgdsf" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "burst", *SMALL, "--policy", "pgdfs"], "pgdsf"),
        (["--workload", "burst", *SMALL, "--policy-config", '{"nonsense": 1}'], "nonsense"),
        (["--workload", "burst", "--gpu-tokens", "200", "--requests", "20"], "200|192"),
        (["--workload", "burst", *SMALL[:-1], "120"], "--warm-up"),
        (["--workload", "burst", "--gpu-tokens", "0"], "--gpu-tokens 0: give at least a page, 16"),
        (["--workload", "burst", "--gpu-tokens", "-9"], "--gpu-tokens -9: give at least a page"),
        (
            ["--workload", "burst", "--gpu-tokens", "1000", "--host-gib", "0.001"],
            "--host-gib gives 8 tokens: give at least a page",
        ),
        (["--trace", "nowhere.jsonl", "--gpu-tokens", "1000"], "nowhere.jsonl"),
        (["--workload", "burst", *SMALL, "--plot", "nowhere/a.png"], "nowhere"),
        (["--workload", "burst", *SMALL, "--cost-table", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, message, capsys):
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("rag-radix: ")
    assert re.search(message, error)


def test_an_unknown_workload_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--workload", "nonsense", *SMALL])
    assert "mmlu-like" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "pgdsf:trace=t.jsonl"], "a replay writes no trace"),
        (["--policy-config", '{"trace": "t.jsonl"}'], "a replay writes no trace"),
        (["--seeds", "1,2"], "--seeds 1,2: a --trace has no seed"),
    ],
)
def test_what_a_replay_cannot_do_is_refused(arguments, said, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text("")
    assert main(["simulate", "--trace", str(path), "--gpu-tokens", "1000", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--seeds", "a"),
        ("--seeds", "1,-2"),
        ("--seeds", ""),
        ("--seed", "-1"),
        ("--host-gib", "nan"),
        ("--host-gib", "inf"),
        ("--host-gib", "-1"),
    ],
)
def test_what_is_no_number_of_the_kind_is_refused(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--workload", "burst", *SMALL, f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err


def test_reordering_finds_more_of_a_long_queue(capsys):
    arguments = ["simulate", "--workload", "mmlu-hot", *SMALL, "--queue", "60", "--json"]
    policies = ["--policy", "pgdsf,pgdsf:reorder_window=0"]
    assert main([*arguments, *policies, "--reorder", "--reorder-window", "16"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("60 in the queue, reordered within a window of 16")
    assert lines[-1].endswith("To what is reordered it is no limit.")
    found = orjson.loads(last)
    rates = [found[label]["token_hit_rate"] for label in ("pgdsf", "pgdsf:reorder_window=0")]
    assert rates[0] > rates[1]
