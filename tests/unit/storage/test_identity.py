"""KV of another model, or of the same one in another form, has another name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rag_radix.storage.identity import identity, identity_name, rank_name, weights_digest


def model(*, bias=0.0, dtype=torch.float32):
    torch.manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(700, 600), torch.nn.Linear(3, 3))
    torch.nn.init.constant_(made[1].bias, bias)
    return made.to(dtype)


def test_the_same_weights_have_the_same_number_and_others_another():
    numbers = {
        weights_digest(model()),
        weights_digest(model(bias=1e-30)),
        weights_digest(model(dtype=torch.bfloat16)),
    }
    assert len(numbers) == 3
    assert weights_digest(model()) in numbers
    assert all(0 <= number < 2**62 for number in numbers)


def test_a_single_changed_weight_anywhere_is_noticed():
    made = model()
    before = weights_digest(made)
    weight = made[0].weight.data.view(-1)
    for position in (0, 1, len(weight) // 2, len(weight) - 1):
        kept = weight[position].clone()
        weight[position] = kept + 1e-3
        assert weights_digest(made) != before
        weight[position] = kept
    assert weights_digest(made) == before


def config(**fields):
    known = {
        "model_name": "m",
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "tp_rank": 0,
        "tp_size": 1,
        "is_mla_model": False,
    }
    return SimpleNamespace(**{**known, **fields})


def pool(**fields):
    known = {"dtype": torch.bfloat16, "layout": "layer_first", "page_size": 16, "layer_num": 2}
    made = SimpleNamespace(**{**known, **fields})
    made.get_dummy_flat_data_page = lambda: torch.zeros(made.page_size * 8, dtype=made.dtype)
    return made


@pytest.mark.parametrize(
    ("other_config", "other_pool", "weights"),
    [
        ({"model_name": "n"}, {}, "1"),
        ({"tp_size": 2}, {}, "1"),
        ({"pp_rank": 1, "pp_size": 2}, {}, "1"),
        ({}, {"dtype": torch.float16}, "1"),
        ({}, {"layout": "page_first"}, "1"),
        ({}, {"page_size": 32}, "1"),
        ({}, {"layer_num": 3}, "1"),
        ({}, {}, "2"),
    ],
)
def test_whatever_decides_the_bytes_of_a_page_decides_the_name(other_config, other_pool, weights):
    name = identity_name(identity(config(), pool(), "1"))
    assert name == identity_name(identity(config(), pool(), "1"))
    assert name != identity_name(identity(config(**other_config), pool(**other_pool), weights))


def test_ranks_have_their_own_parts_unless_they_hold_the_same():
    assert rank_name(config(tp_rank=1, tp_size=2)) == "rank-1-of-2"
    assert rank_name(config(tp_rank=1, tp_size=2, is_mla_model=True)) == "all-ranks"
