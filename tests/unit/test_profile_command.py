from __future__ import annotations

import sys

import orjson
import pytest

from rag_radix.cli import main
from rag_radix.cost_model import PrefillCostTable

from .fake_sglang import FakeSGLang, prefill_s


def test_a_running_server_is_profiled_into_a_file(tmp_path, capsys):
    output = tmp_path / "profile.json"
    with FakeSGLang().serving() as url:
        status = main(["profile", "--url", url, "-o", str(output), "--repeats", "2", "--json"])
    assert status == 0
    table = PrefillCostTable.load(output)
    assert table(0, 64) == pytest.approx(prefill_s(0, 64))
    printed = capsys.readouterr().out
    assert "beats recomputing" in printed
    assert str(output) in printed
    assert orjson.loads(printed.splitlines()[-1]) == orjson.loads(output.read_bytes())


def test_the_longest_prompt_can_be_bounded(tmp_path):
    output, fake = tmp_path / "profile.json", FakeSGLang(prompt_tokens=512)
    with fake.serving() as url:
        main(["profile", "--url", url, "-o", str(output), "--max-tokens", "128", "--repeats", "1"])
    assert PrefillCostTable.load(output).new_tokens[-1] == 128
    assert max(cached + new for cached, new in fake.prompts) == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats 0"),
        (["--max-tokens", "20"], "--max-tokens of at least"),
        (["--", "--dtype", "float32"], "--dtype float32: server flags go with --model-path"),
        (["-o", "nowhere/p.json"], "--output 'nowhere/p.json' can't be written (No such file"),
        (["-o", "/"], "--output '/' can't be written (Is a directory)"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(arguments, message, capsys):
    fake = FakeSGLang()
    with fake.serving() as url:
        assert main(["profile", "--url", url, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert fake.prompts == []


def test_a_plot_is_tried_out_first_and_leaves_no_file(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    fake, output = FakeSGLang(), tmp_path / "profile.json"
    with fake.serving() as url:
        plot = tmp_path / "nowhere" / "profile.png"
        assert main(["profile", "--url", url, "-o", str(output), "--plot", str(plot)]) == 2
    assert f"--plot '{plot}' can't be written" in capsys.readouterr().err
    assert fake.prompts == []
    assert not output.exists()


def test_a_plot_without_matplotlib_is_refused_first(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with FakeSGLang().serving() as url:
        assert main(["profile", "--url", url, "--plot", "profile.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
