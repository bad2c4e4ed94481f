"""What a report says of the machine."""

from __future__ import annotations

import pytest
from rag_radix_benchmarks import figures
from rag_radix_benchmarks.figures import environment, hardware_words

torch = pytest.importorskip("torch")

FAKE_TORCH = """
from types import SimpleNamespace as Values

cuda = Values(
    device_count=lambda: 2,
    get_device_properties=lambda index: Values(name="H200", total_memory=141 * 2**30),
)
"""


@pytest.fixture
def fake_torch(tmp_path, monkeypatch):
    """For processes that are started; this one keeps its own."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    figures._gpus.cache_clear()
    yield
    figures._gpus.cache_clear()


def test_a_torch_without_cuda_is_not_asked_for_gpus(fake_torch, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    hardware = environment()["hardware"]
    assert hardware["gpus"] == []
    assert hardware_words(hardware).endswith(" GiB")


def test_gpus_are_in_a_report_by_name_and_memory(fake_torch, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    hardware = environment()["hardware"]
    assert hardware["gpus"] == [{"name": "H200", "memory_bytes": 141 * 2**30}] * 2
    assert hardware_words(hardware).endswith(" GiB, 2 × H200 with 141 GiB")
    assert not torch.cuda.is_initialized()
