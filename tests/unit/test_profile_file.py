from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import orjson
import pytest

from rag_radix.cost_model import PrefillCostTable
from rag_radix.errors import ConfigError
from rag_radix.profile.file import HitTimes, Profile, Spread, profile_mismatch
from rag_radix.profile.grid import build_grid
from rag_radix.profile.measure import Samples
from rag_radix.profile.report import format_report
from rag_radix.profile.server import Conditions

CONDITIONS = Conditions(
    model="Org/Model-7B",
    device="Card",
    sglang_version="0.5.23",
    attention_backend="flashinfer",
    page_size=1,
    dtype="auto",
    quantization=None,
    kv_cache_dtype="auto",
    tp_size=2,
    chunked_prefill_tokens=4096,
)


def profile(*, host_s=lambda length: 0.004 + 1e-5 * length, host_problem=None):
    """Cold costs 1 ms a token and 2 ms, a device hit 10 ms; three samples, 10% apart."""
    grid = build_grid(512, 1)
    samples = Samples(discarded=2, host_problem=host_problem)
    for point in grid.device_points():
        cost = 0.002 + 0.001 * point.new_tokens + 1e-6 * point.cached_tokens * point.new_tokens
        samples.seconds[point] = [cost * 1.1, cost, cost * 0.9]
    for length in grid.hit_tokens:
        if host_s(length) is not None:
            samples.seconds[grid.hit_point(length, "host")] = [host_s(length)]
    return Profile.of(CONDITIONS, grid, samples, repeats=3, seed=0)


def test_a_spread_is_the_median_and_the_middle_half():
    assert Spread.of([5.0]) == Spread(5.0, 0.0)
    assert Spread.of([4.0, 100.0, 2.0, 3.0, 1.0]) == Spread(3.0, 2.0 / 3.0)


def test_a_profile_is_a_cost_table(tmp_path):
    measured = profile()
    measured.save(tmp_path / "profile.json")
    table = PrefillCostTable.load(tmp_path / "profile.json")
    assert table.cached_tokens == measured.cached_tokens
    assert table.new_tokens == measured.new_tokens
    assert table(0, 16) == pytest.approx(0.018)
    assert table(256, 64) == pytest.approx(0.002 + 0.064 + 1e-6 * 256 * 64)
    # Longer than the context: never measured, and still no cheaper than what was.
    assert table(384, 512) > table(384, 128)
    assert table(384, 512) >= table(256, 512) > 0


def test_a_file_says_what_it_was_measured_on(tmp_path):
    profile().save(tmp_path / "profile.json")
    content = orjson.loads((tmp_path / "profile.json").read_bytes())
    assert content["schema"] == 1
    assert (content["model"], content["device"], content["tp_size"]) == ("Org/Model-7B", "Card", 2)
    assert (content["sglang_version"], content["page_size"]) == ("0.5.23", 1)
    assert content["attention_backend"] == "flashinfer"
    assert (content["repeats"], content["discarded_samples"]) == (3, 2)
    assert content["spread"][0][0] == pytest.approx(0.1)
    assert content["seconds"][-1][1:] == [None] * (len(content["new_tokens"]) - 1)
    hits = content["hits"]
    assert hits["cached_tokens"] == [64, 128, 256, 496]
    assert hits["cold_s"][0] == pytest.approx(0.002 + 0.08)
    assert hits["device_s"][0] == pytest.approx(0.018 + 1e-6 * 64 * 16)
    assert hits["host_s"][0] == pytest.approx(0.00464)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        profile().save(tmp_path / "nowhere" / "profile.json")


@pytest.mark.parametrize(
    ("host_s", "expected"),
    [
        (lambda length: 0.001, "always"),
        (lambda length: 10.0, "never"),
        (lambda length: 0.2, 256),
        # One lucky length doesn't count when a longer one loses.
        (lambda length: 10.0 if length == 256 else 0.001, 496),
        (lambda length: 10.0 if length == 496 else 0.001, "never"),
        (lambda length: None, "never"),
        (lambda length: None if length == 64 else 0.001, "always"),
    ],
)
def test_loading_pays_from_where_it_wins_for_good(host_s, expected):
    assert profile(host_s=host_s).host_pays_from == expected


def test_the_report_shows_costs_ratios_and_where_loading_pays():
    lines = format_report(profile(host_s=lambda length: 0.2)).splitlines()
    assert lines[0].startswith("Org/Model-7B on Card, SGLang 0.5.23, flashinfer attention")
    assert "2 discarded" in lines[1]
    row = next(line for line in lines if line.split()[:2] == ["256", "0.2740"])
    assert row.split()[2:] == ["0.0221", "12.4x", "0.2000", "1.4x"]
    assert lines[-1] == (
        "loading from host beats recomputing from 256 tokens on (measured from 64 to 496 tokens)"
    )


@pytest.mark.parametrize(
    ("host_s", "verdict"),
    [
        (lambda length: 0.001, "at every length (measured from 64 to 496 tokens)"),
        (lambda length: 10.0, "at no length for good (measured"),
    ],
)
def test_the_report_says_always_and_never(host_s, verdict):
    assert verdict in format_report(profile(host_s=host_s))


def test_the_report_says_why_there_are_no_host_hits():
    text = format_report(profile(host_s=lambda length: None, host_problem="no host tier"))
    assert text.endswith("host hits: no host tier")


class TestMismatch:
    @pytest.fixture
    def path(self, tmp_path):
        profile().save(tmp_path / "profile.json")
        return tmp_path / "profile.json"

    @pytest.mark.parametrize("model", ["Org/Model-7B", "/models/Model-7B", "Model-7B/"])
    def test_the_same_model_elsewhere_matches(self, path, model):
        assert profile_mismatch(path, replace(CONDITIONS, model=model)) is None

    def test_what_differs_is_named_with_both_values(self, path):
        served = replace(CONDITIONS, model="Org/Model-1B", kv_cache_dtype="fp8_e4m3", tp_size=4)
        message = profile_mismatch(path, served)
        for part in (
            f"{str(path)!r} was measured with model Org/Model-7B, not Org/Model-1B; ",
            "kv_cache_dtype auto, not fp8_e4m3; tp_size 2, not 4: measure",
        ):
            assert part in message

    def test_another_word_for_the_same_dtype_matches(self, path):
        names = {"auto": "bfloat16"}

        def mismatch(dtype):
            served = replace(CONDITIONS, dtype=dtype)
            return profile_mismatch(path, served, lambda name: names.get(name, name))

        assert mismatch("auto") is mismatch("bfloat16") is None
        assert "dtype auto, not float32" in mismatch("float32")

    def test_a_plain_table_matches_anything(self, tmp_path):
        path = tmp_path / "cost.json"
        path.write_bytes(b'{"cached_tokens": [0, 1], "new_tokens": [1, 2], "seconds": [[1, 1]]}')
        assert profile_mismatch(path, CONDITIONS) is None


class TestServerWithAForeignProfile:
    """What the start says of a profile; arguments as SGLang resolved them."""

    ARGUMENTS: ClassVar = {
        "model_path": "Org/Model-7B",
        "device": "cpu",
        "attention_backend": "torch_native",
        "prefill_attention_backend": "flashinfer",
        "page_size": 1,
        "dtype": "bfloat16",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "tp_size": 2,
        "chunked_prefill_size": 4096,
    }

    @pytest.fixture
    def warned(self, tmp_path, monkeypatch, caplog):
        from rag_radix import backend

        monkeypatch.setattr(backend, "accelerator_name", lambda: "Card")
        monkeypatch.setattr(backend, "version", lambda name: "0.5.23")
        profile().save(tmp_path / "profile.json")
        config = SimpleNamespace(dtype="bfloat16")

        def warned(**arguments):
            args = SimpleNamespace(resolved_dict=lambda: self.ARGUMENTS | arguments)
            ctx = SimpleNamespace(
                server_args=args, model_config=SimpleNamespace(hf_text_config=config)
            )
            backend._warn_of_foreign_profile(str(tmp_path / "profile.json"), ctx)
            return caplog.text

        return warned

    def test_one_of_the_same_kind_of_server_is_used_in_silence(self, warned):
        assert warned() == ""

    def test_the_backend_of_prefills_counts(self, warned):
        said = warned(prefill_attention_backend=None)
        assert "measured with attention_backend flashinfer, not torch_native: measure" in said

    def test_another_precision_is_warned_of(self, warned):
        assert "measured with dtype auto, not float32: measure" in warned(dtype="float32")


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    from rag_radix.profile.plot import save_plot

    save_plot(profile(), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="nowhere"):
        save_plot(profile(), tmp_path / "nowhere" / "profile.png")


def test_hit_times_without_a_host_hit_stay_none_in_the_file():
    hits = profile(host_s=lambda length: None if length == 64 else 0.001).as_json()["hits"]
    assert hits["host_s"][0] is None
    assert hits["host_s"][1] == 0.001
    assert isinstance(profile().hits[0], HitTimes)
