"""Attention that reads shared prefixes once, against the float64 reference, over real pools."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rag_radix_kernels import reference
from rag_radix_kernels.kv_gather import GatherBuffer
from rag_radix_kernels.options import SHARED_PREFIX
from rag_radix_kernels.prefix_backend import PrefixAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from shared_rows import Path, table_of

# As in test_prefix_attention: four roundings of 16-bit values, more additions in float32.
MAX_RELATIVE_ERROR = {
    torch.float32: 1e-5,
    torch.bfloat16: 4 * 2.0**-9,
    torch.float16: 4 * 2.0**-12,
}
QUERY_HEADS, KV_HEADS, DIM = 6, 2, 32
SYSTEM, DOC, NEXT = ("system", 250), ("doc", 2203), ("next", 2100)


def _q(i: int, tokens: int = 40) -> tuple[str, int]:
    return f"question {i}", tokens + i % 7


GROUPS: dict[str, list[Path]] = {
    "alone": [(DOC, _q(0))],
    "nothing shared": [((f"doc {i}", 1100 + i), _q(i)) for i in range(3)],
    "no prefix": [(_q(i, 1),) for i in range(4)],
    "one level": [(DOC, _q(i)) for i in range(5)],
    "long questions": [(DOC, _q(i, 600)) for i in range(6)],
    "a long one": [(("doc", 8000), _q(i)) for i in range(3)],
    "beside others": [(DOC, _q(0)), (("other", 900), _q(1)), (DOC, _q(2)), (_q(3),)],
    "three levels": [
        (SYSTEM, DOC, NEXT, _q(0, 500)),
        (SYSTEM, DOC, _q(1)),
        (SYSTEM, ("other", 2500), _q(2)),
        (SYSTEM, DOC, NEXT, _q(3, 1)),
        (SYSTEM, ("other", 2500), NEXT, _q(4, 300)),
        (_q(5, 2),),
        *((SYSTEM, _q(i)) for i in range(6, 14)),
    ],
    "64 requests": [(SYSTEM, (f"doc {i % 5}", 700), _q(i)) for i in range(64)],
}
SOME = ("alone", "one level", "long questions", "three levels")


@pytest.fixture(autouse=True)
def _single_rank() -> Any:
    torch.manual_seed(0)
    with get_parallel().override(attn_tp_size=1):
        yield


class Batch:
    """A pool with requests on `paths`, and a pass over them."""

    def __init__(
        self,
        paths: list[Path],
        *,
        dtype: torch.dtype = torch.float32,
        page_size: int = 1,
        mla: bool = False,
    ) -> None:
        self.table, places, self.lengths = table_of(paths, page_size=page_size)
        size = int(self.table.max()) // page_size * page_size + page_size
        self.kv_heads = 1 if mla else KV_HEADS
        pool: Any
        if mla:
            pool = MLATokenToKVPool(size, page_size, dtype, 24, 8, 1, "cpu", False)
            pool.kv_buffer[0].copy_(torch.randn(pool.kv_buffer[0].shape))
            self.keys, self.values = pool.kv_buffer[0], pool.kv_buffer[0][..., :24]
        else:
            pool = MHATokenToKVPool(size, page_size, dtype, KV_HEADS, DIM, 1, "cpu", False)
            for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
                buffer.copy_(torch.randn(buffer.shape))
            self.keys, self.values = pool.k_buffer[0], pool.v_buffer[0]
        self.dtype = dtype
        self.runner = SimpleNamespace(
            device="cpu",
            model_config=SimpleNamespace(get_num_kv_heads=lambda ranks: KV_HEADS),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=pool,
        )
        self.layer = RadixAttention(
            QUERY_HEADS,
            DIM,
            scaling=0.2,
            num_kv_heads=self.kv_heads,
            layer_id=0,
            v_head_dim=self.values.shape[-1],
        )
        self.batch: Any = SimpleNamespace(
            req_pool_indices=places, seq_lens=torch.tensor(self.lengths), encoder_lens=None
        )

    def run(self, backend: PrefixAttnBackend, new_lens: list[int] | None = None) -> torch.Tensor:
        """Output of a decode, or of an extend whose requests' last `new_lens` tokens are new."""
        torch.manual_seed(1)
        self.new_lens = new_lens or [1] * len(self.lengths)
        self.slots = [
            self.table[place, :length].long()
            for place, length in zip(self.batch.req_pool_indices, self.lengths, strict=True)
        ]
        pairs = list(zip(self.slots, self.new_lens, strict=True))
        self.batch.out_cache_loc = torch.cat([slots[-new:] for slots, new in pairs])
        self.batch.forward_mode = ForwardMode.EXTEND if new_lens else ForwardMode.DECODE
        self.batch.extend_seq_lens = torch.tensor(self.new_lens)
        self.batch.extend_prefix_lens = self.batch.seq_lens - self.batch.extend_seq_lens
        self.query = torch.randn(sum(self.new_lens), QUERY_HEADS * DIM).to(self.dtype)
        new = self.batch.out_cache_loc
        backend.init_forward_metadata(self.batch)
        forward = backend.forward_extend if new_lens else backend.forward_decode
        output: torch.Tensor = forward(
            self.query, self.keys[new], self.values[new], self.layer, self.batch, False
        )
        return output

    def assert_right(self, actual: torch.Tensor) -> None:
        assert actual.dtype == self.dtype
        queries = self.query.view(-1, QUERY_HEADS, DIM).split(self.new_lens)
        outputs = actual.split(self.new_lens)
        for slots, query, output in zip(self.slots, queries, outputs, strict=True):
            expected, _ = reference.attention(
                query,
                self.keys[slots],
                self.values[slots],
                scale=0.2,
                causal_from=len(slots) - len(query),
            )
            error = (output.double() - expected.flatten(1)).abs().max() / expected.abs().max()
            assert error <= MAX_RELATIVE_ERROR[self.dtype]

    def new_lens_of(self, limit: int) -> list[int]:
        """As an extend over what is shared has them: a few tokens of each question."""
        return [min(n, 1 + i * 5 % limit) for i, n in enumerate(self.lengths)]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("extend", [False, True])
def test_every_group_gets_what_each_request_gets_alone(name: str, extend: bool) -> None:
    batch = Batch(GROUPS[name])
    new_lens = batch.new_lens_of(40) if extend else None
    batch.assert_right(batch.run(PrefixAttnBackend(batch.runner), new_lens))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("extend", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_pools_round_no_more_than_without_groups(
    name: str, extend: bool, dtype: torch.dtype
) -> None:
    batch = Batch(GROUPS[name], dtype=dtype)
    new_lens = batch.new_lens_of(40) if extend else None
    batch.assert_right(batch.run(PrefixAttnBackend(batch.runner), new_lens))


@pytest.mark.parametrize("extend", [False, True])
@pytest.mark.parametrize("options", [{"page_size": 16}, {"mla": True}], ids=["pages", "mla"])
def test_pages_and_latent_keys_are_grouped_alike(extend: bool, options: dict[str, Any]) -> None:
    batch = Batch(GROUPS["three levels"], **options)
    new_lens = batch.new_lens_of(20) if extend else None
    backend = PrefixAttnBackend(batch.runner)
    batch.assert_right(batch.run(backend, new_lens))
    assert len(backend._shared_plans) > 1


def test_requests_join_and_leave_between_passes() -> None:
    batch = Batch(GROUPS["three levels"])
    backend = PrefixAttnBackend(batch.runner)
    places, lengths = batch.batch.req_pool_indices, batch.lengths
    for members in ([0, 1, 2], [0, 2, 3, 4], [3], list(range(14)), [5, 9, 10, 11]):
        batch.batch.req_pool_indices = places[members]
        batch.lengths = [lengths[i] for i in members]
        batch.batch.seq_lens = torch.tensor(batch.lengths)
        batch.assert_right(batch.run(backend))
        batch.assert_right(batch.run(backend, batch.new_lens_of(9)))


def _reads_of_slots(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> Counter[int]:
    read: Counter[int] = Counter()
    gather = GatherBuffer.gather

    def counting(self: GatherBuffer, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        read.update(slots.tolist())
        return gather(self, pool, slots)

    monkeypatch.setattr(GatherBuffer, "gather", counting)
    batch.assert_right(batch.run(PrefixAttnBackend(batch.runner)))
    return read


def test_a_shared_slot_is_read_once_for_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch([(DOC, ("own", 40 + i), _q(i)) for i in range(6)])
    read = _reads_of_slots(monkeypatch, batch)
    shared = batch.slots[0][1 : DOC[1]].tolist()  # the first is also what padding repeats
    assert {read[slot] for slot in shared} == {2}  # its key and its value


def test_own_keys_are_read_with_what_is_shared_as_long_as_they_are_few() -> None:
    few, many = (Batch([(DOC, _q(i, own)) for i in range(6)]) for own in (40, 600))
    backend = PrefixAttnBackend(few.runner)
    few.assert_right(few.run(backend))
    assert (len(backend._decode_plans), len(backend._shared_plans)) == (1, 0)
    backend = PrefixAttnBackend(many.runner)
    many.assert_right(many.run(backend))
    assert (len(backend._decode_plans), len(backend._shared_plans)) == (1, 1)


def test_grouping_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_PREFIX, "0")
    batch = Batch([(DOC, _q(i)) for i in range(6)])
    read = _reads_of_slots(monkeypatch, batch)
    assert read[int(batch.slots[0][1])] == 2 * 6


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_PREFIX, "yes")
    with pytest.raises(ValueError, match="RAG_RADIX_SHARED_PREFIX='yes'"):
        PrefixAttnBackend(Batch([(_q(0),)]).runner)
