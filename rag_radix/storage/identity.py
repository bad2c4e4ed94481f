"""What stored KV belongs to: the same tokens have other KV under any other model or layout."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import orjson
import torch

from rag_radix.storage.segment import FORMAT_VERSION

_CHUNK_BYTES = 1 << 20


def identity(config: Any, pool: Any, weights: str) -> dict[str, Any]:
    """What decides the KV of a page, apart from its tokens.

    Args:
        config: SGLang's `HiCacheStorageConfig`.
        pool: SGLang's host pool, whose pages are stored.
        weights: Of the model, on all ranks; see `weights_digest`.
    """
    return {
        "format": FORMAT_VERSION,
        "model": config.model_name,
        "weights": weights,
        "dtype": str(pool.dtype),
        "pool": type(pool).__name__,
        "layout": pool.layout,
        "page_size": pool.page_size,
        "page_bytes": _page_bytes(pool),
        "layers": pool.layer_num,
        "pp": [config.pp_rank, config.pp_size],
        "attn_cp": [config.attn_cp_rank, config.attn_cp_size],
        "tp_size": 1 if config.is_mla_model else config.tp_size,
    }


def rank_name(config: Any) -> str:
    """Name of the rank's part. Ranks of a latent attention model have the same KV."""
    return "all-ranks" if config.is_mla_model else f"rank-{config.tp_rank}-of-{config.tp_size}"


def identity_name(identity: Mapping[str, Any]) -> str:
    return sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)).hexdigest()[:24]


def _page_bytes(pool: Any) -> int:
    page = pool.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())


def weights_digest(model: Any) -> int:
    """A number below 2^62 for the weights that `model`, a torch module, has in memory.

    It is taken where they are, from sums over pieces of 1 MiB: 40 ms for a gigabyte on one core.
    """
    digest = sha256()
    for name, tensor in model.state_dict().items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        words = len(data) // 8
        if words and data.data_ptr() % 8 == 0:
            values = data[: words * 8].view(torch.int64)
            whole = len(values) * 8 // _CHUNK_BYTES * (_CHUNK_BYTES // 8)
            sums = [values[:whole].view(-1, _CHUNK_BYTES // 8).sum(1), values[whole:].sum()[None]]
            digest.update(torch.cat(sums).cpu().numpy().tobytes())
            data = data[words * 8 :]
        digest.update(data.cpu().numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 2
