"""What keeps the KV of an adapter apart from that of another one, or of the same name before."""

from __future__ import annotations

from array import array

from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from rag_radix.statistics import DocumentKey


def test_an_adapter_that_is_loaded_again_has_a_namespace_of_its_own():
    first, again = (LoRARef(lora_name="style", lora_path="/adapters/style") for _ in range(2))
    keys = [
        Req("r", "", array("q", [1]), SamplingParams(), lora_id=each.lora_id, extra_key="k")
        for each in (first, again)
    ]
    names = {DocumentKey("a", extra_key=req.extra_key).namespace for req in keys}
    assert len(names) == 2
    assert all(req.extra_key.startswith("k") for req in keys)
