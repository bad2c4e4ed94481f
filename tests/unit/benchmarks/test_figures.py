"""What a report says of the machine."""

from __future__ import annotations

import argparse

import pytest
from rag_radix_benchmarks.figures import environment, hardware_words


def fake_torch(monkeypatch, cuda, gpus):
    torch = pytest.importorskip("torch")

    def properties(index):
        assert gpus, "asked without CUDA"
        return argparse.Namespace(name=gpus[index], total_memory=141 * 2**30)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_machine_without_a_gpu_has_none(monkeypatch, cuda):
    fake_torch(monkeypatch, cuda, [])
    assert environment()["hardware"]["gpus"] == []


def test_gpus_are_in_a_report_by_name_and_memory(monkeypatch):
    fake_torch(monkeypatch, "13.0", ["H200", "H200"])
    hardware = environment()["hardware"]
    assert hardware["gpus"] == [{"name": "H200", "memory_bytes": 141 * 2**30}] * 2
    assert hardware_words(hardware).endswith(" GiB, 2 × H200 with 141 GiB")
